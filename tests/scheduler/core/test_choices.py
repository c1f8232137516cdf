"""Several choices of one prompt: computed once, forked, and then each on its own."""

from typing import Any

from services.scheduler.core.plan import StepOutput
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import EndReason, Error, Sequence
from tests.support.arithmetic.drive import Drive, capacity, sequence
from tests.support.arithmetic.model import generate


def choices(name: str, prompt: list[int], count: int, n: int, **more: Any) -> list[Sequence]:
    return [sequence(name, prompt, count, choice=c, **more) for c in range(n)]


def test_the_prompt_is_computed_once_and_the_partly_filled_block_is_copied_for_all_but_one() -> (
    None
):
    drive = Drive(Scheduler(capacity()))
    prompt = list(range(1, 31))  # seven full blocks of four, and two tokens
    drive.scheduler.add(*choices("r", prompt, 9, 4))
    drive.send()
    plan = drive.in_flight[0]
    assert plan.row_count == [30]
    assert plan.sample_row == [0, 0, 0, 0]
    assert len(plan.fork_child) == 3
    drive.send()
    plan = drive.in_flight[1]
    assert len(plan.row_slot) == 4
    assert len(plan.copy_src) == 3 and len(plan.edit_slot) == 3
    assert drive.scheduler.state.blocks.num_used == 7 + 4
    drive.finish()
    for c in range(4):
        assert drive.outputs_of["r", c] == generate(prompt, 9, c)
    assert drive.scheduler.state.blocks.num_used == 0
    assert drive.decoder.worker.slots.empty


def test_a_prompt_that_ends_with_its_block_needs_no_copy() -> None:
    drive = Drive(Scheduler(capacity()))
    drive.scheduler.add(*choices("r", list(range(1, 29)), 3, 3))
    drive.finish()
    assert drive.decoder.worker.blocks_copied == 0
    assert drive.outputs_of["r", 2] == generate(list(range(1, 29)), 3, 2)


def test_choices_end_on_their_own() -> None:
    drive = Drive(Scheduler(capacity()))
    prompt = [5, 6, 7]
    stop = generate(prompt, 8, 1)[3]
    drive.scheduler.add(*choices("r", prompt, 8, 3, stop_token_ids=frozenset({stop})))
    drive.finish()
    for c in range(3):
        whole = generate(prompt, 8, c)
        kept = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert drive.outputs_of["r", c] == kept
    assert drive.endings_of["r", 1] is EndReason.STOP


def test_cancel_ends_all_choices_before_and_after_the_fork() -> None:
    for steps in range(4):
        drive = Drive(Scheduler(capacity(max_batched_tokens=8)))
        drive.scheduler.add(*choices("r", list(range(1, 15)), 30, 3))
        for _ in range(steps):
            drive.send()
        assert len(drive.scheduler.cancel("r")) == 3
        assert drive.scheduler.cancel("r") == []
        drive.finish()
        assert drive.decoder.worker.slots.empty
        assert drive.scheduler.state.blocks.num_used == drive.scheduler.state.num_sequences == 0
        # All slots are there again.
        drive.scheduler.add(*choices("again", [1, 2, 3], 2, 8))
        drive.finish()
        assert len(drive.outputs_of["again", 7]) == 2


def test_choices_wait_until_all_have_a_slot() -> None:
    drive = Drive(Scheduler(capacity(max_slots=4)))
    drive.scheduler.add(sequence("first", [1, 2], 6))
    drive.scheduler.add(sequence("second", [1, 2], 12))
    drive.scheduler.add(*choices("r", [3, 4, 5], 5, 3, arrival=1))
    drive.send()
    assert len(drive.in_flight[0].row_slot) == 2
    drive.finish()
    assert drive.outputs_of["r", 2] == generate([3, 4, 5], 5, 2)


def test_more_choices_than_slots_are_refused_with_both_numbers() -> None:
    ending = Scheduler(capacity(max_slots=4)).add(*choices("r", [1, 2], 5, 5))
    assert ending is not None and ending.error is not None
    assert ending.error.reason == "TOO_MANY_CHOICES"
    assert "5 choices" in ending.error.message and "4 sequences" in ending.error.message


def test_a_failed_prompt_fails_all_choices() -> None:
    for steps, tokens in ((1, []), (2, [-1, -1, -1])):
        drive = Drive(Scheduler(capacity(max_batched_tokens=8)))
        drive.scheduler.add(*choices("r", list(range(1, 15)), 30, 3))
        for _ in range(steps - 1):
            drive.step()
        drive.send()
        failed = {0: Error("NAN_LOGITS", "not a number")}
        progress = list(drive.scheduler.complete(StepOutput(tokens, failed)))
        assert [p.ending and p.ending.reason for p in progress] == [EndReason.ERROR] * 3
        assert drive.scheduler.state.num_sequences == drive.scheduler.state.blocks.num_used == 0


def test_one_sample_of_a_row_may_fail_alone() -> None:
    drive = Drive(Scheduler(capacity()))
    drive.scheduler.add(*choices("r", [1, 2, 3, 4], 3, 3))
    drive.send()
    plan = drive.in_flight.pop()
    tokens = drive.decoder.run(plan).tokens
    tokens[1] = -1
    progress = drive.scheduler.complete(StepOutput(tokens, {0: Error("NO_TOKEN_LEFT", "none")}))
    assert [(p.sequence.choice, p.token) for p in progress] == [
        (1, None),
        (0, tokens[0]),
        (2, tokens[2]),
    ]
    for c in (0, 2):
        drive.outputs_of["r", c].append(tokens[c])
    drive.finish()
    assert drive.outputs_of["r", 2] == generate([1, 2, 3, 4], 3, 2)


def test_taken_over_in_the_middle_each_choice_goes_on_from_its_log() -> None:
    drive = Drive(Scheduler(capacity()))
    prompt = list(range(1, 12))
    known = {0: 4, 2: 1}  # choice 1 has ended before, 3 and 4 have nothing yet
    for c, count in known.items():
        tokens = prompt + generate(prompt, count, c)
        drive.scheduler.add(Sequence("r", tokens, len(prompt), 9, choice=c))
        drive.outputs_of["r", c] = generate(prompt, count, c)
    drive.scheduler.add(*choices("r", prompt, 9, 5)[3:])
    drive.finish()
    for c in (0, 2, 3, 4):
        assert drive.outputs_of["r", c] == generate(prompt, 9, c)
    assert ("r", 1) not in drive.outputs_of


def test_out_of_blocks_choices_are_preempted_one_by_one() -> None:
    drive = Drive(Scheduler(capacity(num_blocks=18, max_batched_tokens=16)))
    prompt = list(range(1, 14))
    drive.scheduler.add(*choices("r", prompt, 25, 4))
    drive.scheduler.add(sequence("other", [7, 7, 7], 30, arrival=1))
    drive.finish()
    assert drive.scheduler.state.preemptions > 0
    for c in range(4):
        assert drive.outputs_of["r", c] == generate(prompt, 25, c)
    assert drive.outputs["other"] == generate([7, 7, 7], 30)


def test_a_prompt_that_is_scored_uses_no_cached_block_but_leaves_some() -> None:
    drive = Drive(Scheduler(capacity()))
    prompt = list(range(1, 30))
    drive.scheduler.add(sequence("first", prompt, 2))
    drive.finish()
    drive.scheduler.add(*choices("scored", prompt, 2, 2, reads_prompt=True))
    drive.send()
    assert drive.in_flight[0].row_start == [0]
    drive.finish()
    drive.scheduler.add(sequence("third", prompt, 2))
    drive.send()
    assert drive.in_flight[0].row_start == [28]
