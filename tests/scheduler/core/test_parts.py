"""What a model needs whole is computed in one step: media spans, prefixes, prompts; and models with state."""

import pytest

from services.scheduler.core.blocks import extend_hashes
from services.scheduler.core.budget import AttentionKind
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.planner import PreemptionMode
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import MediaSpan
from tests.support.arithmetic.drive import Drive, capacity, sequence

MEDIA, PREFIX = AttentionKind.BIDIRECTIONAL_MEDIA, AttentionKind.PREFIX_LM
TEXT = [i % 90 + 1 for i in range(100)]


def span(number: int, offset: int, length: int) -> MediaSpan:
    return MediaSpan(bytes([number]) * 16, offset, length, length)


def make_ready(drive: Drive) -> None:
    """Every item that is wanted now is encoded and fetched."""
    scheduler = drive.scheduler
    wanted = scheduler.state.media.take_wanted()
    for item in wanted:
        scheduler.embeddings_encoded(item.digest, item.digest)
    if wanted and not drive.send():
        return
    for item in wanted:
        scheduler.embeddings_ready(item.digest)


def counts(plans: list[StepPlan], name: str) -> list[int]:
    """The tokens of a request's rows that compute its prompt."""
    rows = [row for plan in plans for row in plan.rows if row.sequence.request_id == name]
    return [row.count for row in rows if row.start < row.sequence.prompt_len]


def run(drive: Drive, name: str) -> list[StepPlan]:
    """Steps until a request has its first token, with a plan ahead."""
    plans = list(drive.in_flight)
    for _ in range(100):
        if drive.outputs[name]:
            return plans
        while len(drive.in_flight) < 2 and drive.send():
            plans.append(drive.in_flight[-1])
        drive.answer()
    raise AssertionError("it has got no token")


@pytest.mark.parametrize("budget", [8, 24, 272])
def test_streams_decode_beside_a_long_span(budget: int) -> None:
    """256 tokens of one picture: whether the budget is smaller than that or not, and whoever decodes."""
    sizes = {"num_blocks": 400, "max_slots": 24, "max_model_len": 600}
    limits = capacity(MEDIA, max_batched_tokens=budget, max_step_tokens=279, **sizes)
    drive = Drive(Scheduler(limits, step_target=1.0))
    drive.scheduler.costs.announced(1_000, 10)
    for number in range(20 if budget > 8 else 5):
        drive.scheduler.add(sequence(f"s{number}", [number + 1] * 3, 60, number))
    for _ in range(3 if budget > 8 else 8):
        drive.step()
    prompt = [5] * 6 + [99] * 256 + TEXT[:10]
    drive.scheduler.add(sequence("picture", prompt, 5, 100, media=(span(1, 6, 256),)))
    make_ready(drive)
    plans = run(drive, "picture")
    # One step holds the span, and all streams with it.
    assert [c for c in counts(plans, "picture") if c >= 256] == [256]
    (largest,) = [plan for plan in plans if plan.num_tokens >= 256]
    assert len(largest.row_slot) > (20 if budget > 8 else 5)
    drive.finish()
    assert drive.outputs["picture"] == drive.generate(prompt, 5, media=(span(1, 6, 256),))
    for number in range(5):
        assert drive.outputs[f"s{number}"] == drive.generate([number + 1] * 3, 60)


def test_only_one_span_at_a_time_exceeds_the_budget() -> None:
    drive = Drive(Scheduler(capacity(MEDIA, max_batched_tokens=16, max_step_tokens=64)))
    for number in range(3):
        prompt = [99] * 20 + [number + 1]
        drive.scheduler.add(sequence(f"r{number}", prompt, 3, number, media=(span(number, 0, 20),)))
    make_ready(drive)
    plans = run(drive, "r2")
    assert [plan.num_tokens >= 20 for plan in plans[:4]].count(True) == 3
    assert all(plan.num_tokens < 40 for plan in plans)
    drive.finish()
    assert all(len(drive.outputs[f"r{number}"]) == 3 for number in range(3))


@pytest.mark.parametrize(
    ("kind", "whole", "reason"),
    [
        (MEDIA, False, "MEDIA_TOO_LONG"),
        (PREFIX, False, "PROMPT_TOO_LONG"),
        (MEDIA, True, "PROMPT_TOO_LONG"),
    ],
)
def test_a_part_beyond_the_largest_step_is_refused(
    kind: AttentionKind, whole: bool, reason: str
) -> None:
    core = Scheduler(
        capacity(kind, whole_prompt=whole, max_batched_tokens=16, max_step_tokens=50, max_slots=11)
    )
    fits = sequence("a", [1] * 40, 1, media=(span(1, 0, 40),))
    assert core.add(fits) is None
    ending = core.add(sequence("b", [1] * 41, 1, media=(span(2, 0, 41),)))
    assert ending is not None and ending.error is not None
    assert ending.error.reason == reason and "at most 40 beside 10 others" in ending.error.message
    if kind is MEDIA and not whole:
        assert core.add(sequence("c", [1] * 60, 1, media=(span(3, 10, 30),))) is None


def test_a_cached_prefix_never_ends_inside_a_span() -> None:
    drive = Drive(Scheduler(capacity(MEDIA)))
    head = [1] * 6 + [99] * 10 + [2] * 4 + [99] * 7
    media = (span(1, 6, 10), span(2, 20, 7))
    for number, tail in enumerate(([3] * 6, [4] * 9, [5])):
        prompt = head + tail
        drive.scheduler.add(sequence(f"r{number}", prompt, 3, number, media=media))
        make_ready(drive)
        plans = run(drive, f"r{number}")
        # Blocks of four tokens: 24 tokens are cached, which is inside the second span, 20 of them are used.
        assert sum(counts(plans, f"r{number}")) == len(prompt) - (20 if number else 0)
        drive.finish()
        assert drive.outputs[f"r{number}"] == drive.generate(prompt, 3, media=media)
    other = (span(3, 6, 10), span(2, 20, 7))
    drive.scheduler.add(sequence("other", [*head, 3], 1, 9, media=other))
    make_ready(drive)
    # 4 tokens before another picture.
    assert sum(counts(run(drive, "other"), "other")) == 28 - 4


def test_a_prefix_is_computed_whole_and_found_by_equal_prompts_alone() -> None:
    drive = Drive(Scheduler(capacity(PREFIX, max_batched_tokens=16, max_step_tokens=200)))
    for number, prompt in enumerate((TEXT[:50], TEXT[:50], TEXT[:51], TEXT[:8])):
        name = f"r{number}"
        drive.scheduler.add(sequence(name, prompt, 6, number))
        plans = run(drive, name)
        assert counts(plans, name) == [50 - 48] if number == 1 else [len(prompt)]
        drive.finish()
        assert drive.outputs[name] == drive.generate(prompt, 6)


def test_the_name_of_every_block_depends_on_the_whole_prefix() -> None:
    limits, causal = capacity(PREFIX), capacity()
    item = (span(1, 8, 4),)
    made = [
        sequence("a", TEXT[:20], 1),
        sequence("b", [*TEXT[:19], 96], 1),  # the last token
        sequence("c", TEXT[:20], 1, media=item),
        sequence("d", TEXT[:20], 1, media=(span(2, 8, 4),)),
        sequence("e", TEXT[:21], 1),
    ]
    for one in made:
        extend_hashes(one, limits)
    assert len({one.block_hashes[0] for one in made}) == len(made)
    # What was generated belongs to no prefix: a request that comes back with its log finds what it had.
    resumed = sequence("a", TEXT[:20], 9)
    resumed.tokens += [7, 8, 9, 10]
    extend_hashes(resumed, limits)
    assert resumed.block_hashes[:5] == made[0].block_hashes and len(resumed.block_hashes) == 6
    plain = sequence("a", TEXT[:20], 1)
    extend_hashes(plain, causal)
    assert plain.block_hashes[0] != made[0].block_hashes[0]


def test_a_whole_prompt_reuses_nothing_of_others() -> None:
    limits = capacity(whole_prompt=True, max_batched_tokens=16, max_step_tokens=200)
    drive = Drive(Scheduler(limits))
    for number in range(2):
        drive.scheduler.add(sequence(f"r{number}", TEXT[:50], 6, number))
        assert counts(run(drive, f"r{number}"), f"r{number}") == [50]
        drive.finish()
        assert drive.outputs[f"r{number}"] == drive.generate(TEXT[:50], 6)


@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("whole", [False, True])
def test_state_is_computed_again_and_forked(mode: PreemptionMode, whole: bool) -> None:
    """Preemption for want of blocks, choices that share a prompt, a restart: nothing is swapped, found or sealed."""
    limits = capacity(
        whole_prompt=whole,
        num_blocks=24,
        num_host_blocks=30,
        max_step_tokens=100,
        max_slots=8,
        has_state=True,
    )
    drive = Drive(Scheduler(limits, preemption_mode=mode))
    drive.scheduler.costs.announced(2, 2)
    for number in range(3):
        siblings = [
            sequence(f"r{number}", TEXT[:13], 30, number, choice=choice) for choice in range(2)
        ]
        drive.scheduler.add(*siblings)
    drive.finish()
    state = drive.scheduler.state
    assert state.preemptions > 0 and state.swaps == 0 and state.blocks.hits == 0
    for number in range(3):
        for choice in range(2):
            expected = drive.generate(TEXT[:13], 30, choice)
            assert drive.outputs_of[f"r{number}", choice] == expected


@pytest.mark.parametrize(("kind", "whole"), [(PREFIX, False), (AttentionKind.CAUSAL, True)])
def test_sequences_that_need_all_items_do_not_wait_for_each_other(
    kind: AttentionKind, whole: bool
) -> None:
    """The budget of embeddings holds one item, and some are shared: what is there for one stays for another."""
    limits = capacity(kind, whole_prompt=whole, max_step_tokens=200)
    drive = Drive(Scheduler(limits, encoder_budget=6))
    items = {"z": (1,), "y": (3, 4), "x": (1, 2), "w": (4, 2, 3)}
    for number, (name, used) in enumerate(items.items()):
        prompt = [99] * 6 * len(used) + [number + 1]
        media = tuple(span(item, 6 * place, 6) for place, item in enumerate(used))
        assert drive.scheduler.add(sequence(name, prompt, 2, number, media=media)) is None
    for _ in range(30):
        make_ready(drive)
        drive.finish()
    assert all(len(drive.outputs[name]) == 2 for name in items)
