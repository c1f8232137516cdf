"""A step's length is bounded in time while sequences decode: the core against a decoder whose times are known."""

from collections.abc import Collection

import pytest

from services.scheduler.core.beams import BeamSearch
from services.scheduler.core.budget import AttentionKind, Costs
from services.scheduler.core.plan import Progress, StepPlan
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import EndReason, MediaSpan, Sequence
from tests.support.arithmetic.drive import Drive, capacity, search_alone, sequence, start_of

TARGET_MS = 250.0
BLOCK = 16
STREAMS = 8


class SlowDrive(Drive):
    """A decoder that needs 5 ms for a step, `token_ms` for a token, `pair_us` for each token that a token looks at."""

    def __init__(
        self,
        target_ms: float = TARGET_MS,
        token_ms: float = 10.0,
        pair_us: float = 0.0,
        attention: AttentionKind = AttentionKind.CAUSAL,
        **changes: int,
    ) -> None:
        sizes = {"num_blocks": 400, "block_size": BLOCK, "max_slots": 12, "max_model_len": 2000}
        limits = capacity(attention, **{**sizes, "max_batched_tokens": 272, **changes})
        super().__init__(Scheduler(limits, step_target=1000 * target_ms))
        self.token_ms, self.pair_us = token_ms, pair_us
        self.plans: list[StepPlan] = []
        self.scheduler.costs.announced(5_000, 1_000 * token_ms)

    def send(self) -> bool:
        sent = super().send()
        if sent:
            self.plans.append(self.in_flight[-1])
        return sent

    def answer(self, failing_rows: Collection[int] = ()) -> list[Progress]:
        plan = self.in_flight[0]
        progress = super().answer(failing_rows)
        if plan.num_tokens:
            took = 1000 * self.took_ms(plan)
            self.scheduler.costs.learn(plan.num_tokens, plan.num_pairs, took)
        return progress

    def took_ms(self, plan: StepPlan) -> float:
        return 5 + self.token_ms * plan.num_tokens + self.pair_us * plan.num_pairs / 1000

    def add_streams(self) -> None:
        """Sequences that generate from now on."""
        for number in range(STREAMS):
            self.scheduler.add(sequence(f"stream{number}", [number + 1] * 3, 500, number))
        self.step()
        self.plans.clear()

    def prompt_tokens(self, plan: StepPlan) -> int:
        """Of the long prompt."""
        rows = (row for row in plan.rows if row.sequence.request_id == "long")
        return sum(row.count for row in rows if row.start < row.sequence.prompt_len)

    def compute_long_prompt(self, length: int) -> list[int]:
        """With one plan ahead, until its first token is there. Returns its tokens of each step."""
        prompt = [i % 90 + 1 for i in range(length)]
        self.scheduler.add(sequence("long", prompt, 2, 100))
        while not self.outputs["long"]:
            while len(self.in_flight) < 2:
                assert self.send()
            self.answer()
        assert self.outputs["long"][0] == self.generate(prompt, 1)[0]
        return [count for plan in self.plans if (count := self.prompt_tokens(plan))]


def test_a_long_prompt_does_not_delay_sequences_that_decode() -> None:
    drive = SlowDrive()
    drive.add_streams()
    counts = drive.compute_long_prompt(700)
    assert sum(counts) == 700 and max(counts) == BLOCK  # 85 ms for the streams, 160 for the prompt
    for plan in drive.plans:
        assert plan.has_decoding and drive.took_ms(plan) <= TARGET_MS
        assert plan.num_tokens - drive.prompt_tokens(plan) >= STREAMS  # none of them is left out


def test_alone_a_prompt_has_the_whole_step() -> None:
    drive = SlowDrive()
    assert drive.compute_long_prompt(700) == [272, 272, 156]
    assert not any(plan.has_decoding for plan in drive.plans if drive.prompt_tokens(plan))


def test_without_a_target_tokens_alone_bound_a_step() -> None:
    drive = SlowDrive(target_ms=0)
    drive.add_streams()
    assert drive.compute_long_prompt(500) == [248, 248, 4]


def test_a_prompt_goes_on_where_the_streams_alone_take_longer_than_the_target() -> None:
    drive = SlowDrive(target_ms=20)
    drive.add_streams()
    assert drive.compute_long_prompt(100) == [16] * 6 + [4]


@pytest.mark.parametrize("token_ms", [7.0, 14.0])
def test_prompts_get_half_of_each_step_where_streams_take_nearly_the_target_or_more(
    token_ms: float,
) -> None:
    """32 streams take 229 or 453 ms of 250, which leave three tokens or none."""
    drive = SlowDrive(token_ms=token_ms, max_slots=40)
    for number in range(32):
        drive.scheduler.add(sequence(f"stream{number}", [number + 1] * 3, 500, number))
    drive.step()
    drive.plans.clear()
    counts = drive.compute_long_prompt(263)
    assert sum(counts) == 263 and {*counts[:-1]} <= {31, 32}
    for plan in [plan for plan in drive.plans if drive.prompt_tokens(plan)][:-1]:
        prompt_ms = token_ms * drive.prompt_tokens(plan)
        # To two tokens: 5 ms of each step are nobody's, and what attention costs is learned.
        assert drive.took_ms(plan) / 2 - 2 * token_ms <= prompt_ms <= drive.took_ms(plan) / 2


def test_with_few_streams_the_target_bounds_a_step() -> None:
    drive = SlowDrive(token_ms=4)
    drive.add_streams()  # they take 37 ms
    counts = drive.compute_long_prompt(120)
    assert counts == [48, 48, 24]
    assert max(map(drive.took_ms, drive.plans)) <= TARGET_MS


def test_several_prompts_share_what_one_would_have_had() -> None:
    drive = SlowDrive(target_ms=20)
    drive.add_streams()
    for number in range(3):
        drive.scheduler.add(sequence(f"short{number}", [50 + number] * 9, 2, 50 + number))
    for expected in ([9, 7], [2, 9]):
        drive.step()
        counts = zip(drive.plans[-1].row_sequence, drive.plans[-1].row_count, strict=True)
        assert [n for s, n in counts if s.request_id.startswith("short") and n > 1] == expected


def test_attention_to_a_long_past_makes_chunks_shorter() -> None:
    """A token with 1,600 before it costs 2.6 times as much as the first one, which nobody has announced."""
    drive = SlowDrive(token_ms=2, pair_us=2)
    drive.add_streams()
    counts = drive.compute_long_prompt(1700)
    steps = [drive.took_ms(plan) for plan in drive.plans if drive.prompt_tokens(plan)]
    assert max(steps) <= 1.25 * TARGET_MS  # what is seen is a step or two behind
    assert max(steps[len(steps) // 2 :]) <= 1.1 * TARGET_MS
    assert min(steps[:-1]) > 0.7 * TARGET_MS
    assert counts[0] >= 2 * counts[-2]


def test_a_wrong_announcement_is_corrected_by_what_is_seen() -> None:
    for announced in (200, 20_000):  # it is 2,000
        drive = SlowDrive(token_ms=2)
        drive.scheduler.costs.announced(announced / 2, announced)
        drive.add_streams()
        drive.compute_long_prompt(1800)
        late = [p for p in drive.plans if drive.prompt_tokens(p)][7:]
        assert all(drive.took_ms(plan) <= 1.2 * TARGET_MS for plan in late)
        assert min(map(drive.prompt_tokens, late[:-1])) >= 3 * BLOCK


def test_beams_bound_steps_also_while_their_answer_is_in_flight() -> None:
    drive = SlowDrive()
    search = BeamSearch[Sequence](num_beams=2, max_tokens=6)
    drive.scheduler.add(
        sequence("beams", [5, 6, 7], 6, 0, beams=search, num_logprobs=search.num_top)
    )
    drive.send()
    drive.scheduler.add(sequence("long", [8] * 200, 2, 1))
    drive.send()  # the search waits for its first answer
    assert [row.sequence.request_id for row in drive.in_flight[1].rows] == ["long"]
    assert drive.in_flight[1].rows[0].count == BLOCK
    drive.finish()
    start = start_of(drive.scheduler.capacity, [5, 6, 7])
    alone = search_alone([5, 6, 7], BeamSearch[Sequence](num_beams=2, max_tokens=6), start)
    assert [h.score for h in drive.found["beams"]] == [h.score for h in alone]


def spans_of(drive: Drive, *spans: tuple[int, int]) -> tuple[MediaSpan, ...]:
    return tuple(MediaSpan(bytes([i]) * 16, *span, span[1]) for i, span in enumerate(spans))


def test_a_span_that_may_not_be_split_takes_the_time_that_it_needs() -> None:
    drive = SlowDrive(attention=AttentionKind.BIDIRECTIONAL_MEDIA)
    drive.add_streams()
    media = spans_of(drive, (40, 100), (140, 30))
    prompt = [i % 90 + 1 for i in range(200)]
    drive.scheduler.add(sequence("long", prompt, 2, 100, media=media))
    for span in drive.scheduler.state.media.take_wanted():
        drive.scheduler.embeddings_encoded(span.digest, "artifact")
    drive.step()
    for span in media:
        drive.scheduler.embeddings_ready(span.digest)
    while not drive.outputs["long"]:
        drive.step()
    counts = [count for plan in drive.plans if (count := drive.prompt_tokens(plan))]
    # Text up to the first item, each item whole, text by the time that is left.
    assert counts == [16, 16, 8, 100, 30, 16, 14]
    assert drive.outputs["long"][0] == drive.generate(prompt, 1, media=media)[0]


def test_a_span_that_can_never_be_computed_whole_is_refused() -> None:
    drive = SlowDrive(attention=AttentionKind.BIDIRECTIONAL_MEDIA, max_batched_tokens=64)
    longest = 64 - 11
    for length, fits in ((longest, True), (longest + 1, False)):
        media = spans_of(drive, (2, length))
        ending = drive.scheduler.add(sequence(f"r{length}", [1] * 80, 2, media=media))
        assert (ending is None) == fits
    assert ending is not None and ending.reason is EndReason.ERROR and ending.error is not None
    assert ending.error.reason == "MEDIA_TOO_LONG" and "at most 53" in ending.error.message


@pytest.mark.parametrize("of_step", [20_000.0, 2_000.0])
def test_steps_that_only_decode_leave_the_cost_of_prompts(
    of_step: float,
) -> None:
    costs = Costs()
    costs.announced(20_000, 1_000)
    for _ in range(5_000):
        costs.learn(8, 8 * 500, of_step + 8 * 1_000)
    assert costs.predict(8, 8 * 500) == pytest.approx(of_step + 8 * 1_000, rel=0.01)
    assert 400 < costs.of_token < 1_100


def test_one_step_that_took_far_too_long_is_soon_forgotten() -> None:
    costs = Costs()
    costs.announced(20_000, 1_000)
    costs.learn(100, 0, 50 * 120_000)
    assert costs.predict(100) < 2 * 120_000
    for _ in range(10):
        costs.learn(100, 0, 120_000)
    assert costs.predict(100) == pytest.approx(120_000, rel=0.05)


def test_without_announced_costs_the_first_step_gives_them() -> None:
    costs = Costs()
    assert costs.predict(100) == 0
    costs.learn(64, 0, 500_000)
    assert costs.predict(64) == pytest.approx(500_000) and 0 < costs.predict(1) < 500_000


@pytest.mark.parametrize("target_ms", [0.0, TARGET_MS])
def test_a_prompt_gets_a_block_a_step_beside_as_many_streams_as_there_are_slots(
    target_ms: float,
) -> None:
    """The sizes are a decoder's own: no more tokens are left of a step than a block and one."""
    drive = SlowDrive(target_ms, max_slots=256, num_blocks=2000)
    for number in range(255):
        drive.scheduler.add(sequence(f"stream{number}", [number % 100 + 1] * 3, 80, number))
    for _ in range(20):
        drive.step()
    drive.plans.clear()
    drive.scheduler.add(sequence("prompt", [7] * 10 * BLOCK, 5, 255))
    for _ in range(14):
        drive.step()
    sampled = {one.request_id for plan in drive.plans for one in plan.sample_sequence}
    assert "prompt" in sampled
