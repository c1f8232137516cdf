"""Preemption: which sequence loses its blocks, by which policy, and how it gets them back."""

import pytest

from services.scheduler.core.planner import PreemptionMode
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import POLICIES
from tests.support.arithmetic.drive import Drive, capacity, sequence
from tests.support.arithmetic.model import generate


def crowd(drive: Drive, number: int = 4, count: int = 30) -> dict[str, list[int]]:
    prompts = {f"r{i}": [10 * i + j for j in range(1, 13)] for i in range(number)}
    for arrival, (name, prompt) in enumerate(prompts.items()):
        assert drive.scheduler.add(sequence(name, prompt, count, arrival)) is None
    return prompts


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_outputs_are_the_same_with_every_preemption_mode(mode: PreemptionMode) -> None:
    many = capacity(num_blocks=16, max_batched_tokens=16, num_host_blocks=24)
    drive = Drive(Scheduler(many, preemption_mode=mode))
    prompts = crowd(drive)
    drive.finish()
    for name, prompt in prompts.items():
        assert drive.outputs[name] == generate(prompt, 30)
    assert drive.scheduler.state.preemptions > 0
    assert (drive.scheduler.state.swaps > 0) == (mode is not PreemptionMode.RECOMPUTE)
    assert (drive.decoder.worker.blocks_swapped_in > 0) == (drive.scheduler.state.swaps > 0)
    assert drive.scheduler.state.swapping.host.num_free == 24
    assert drive.scheduler.state.blocks.num_used == 0


def test_auto_takes_the_cheaper_of_swap_and_recompute() -> None:
    for of_token, of_block, swaps in ((10.0, 1.0, True), (1.0, 100.0, False)):
        drive = Drive(Scheduler(capacity(num_blocks=16, num_host_blocks=24)))
        drive.scheduler.costs.of_token, drive.scheduler.costs.of_block = of_token, of_block
        crowd(drive)
        drive.finish()
        assert (drive.scheduler.state.swaps > 0) == swaps


def test_without_host_blocks_everything_is_computed_again() -> None:
    drive = Drive(Scheduler(capacity(num_blocks=16), preemption_mode=PreemptionMode.SWAP))
    prompts = crowd(drive)
    drive.finish()
    assert drive.scheduler.state.preemptions > 0 and drive.scheduler.state.swaps == 0
    for name, prompt in prompts.items():
        assert drive.outputs[name] == generate(prompt, 30)


def test_when_host_blocks_run_out_the_rest_is_computed_again() -> None:
    many = capacity(num_blocks=16, num_host_blocks=5)
    drive = Drive(Scheduler(many, preemption_mode=PreemptionMode.SWAP))
    prompts = crowd(drive, number=6)
    drive.finish()
    assert 0 < drive.scheduler.state.swaps < drive.scheduler.state.preemptions
    for name, prompt in prompts.items():
        assert drive.outputs[name] == generate(prompt, 30)


def test_what_a_cancelled_sequence_had_swapped_out_is_free_again() -> None:
    many = capacity(num_blocks=16, num_host_blocks=24)
    drive = Drive(Scheduler(many, preemption_mode=PreemptionMode.SWAP))
    crowd(drive)
    while not drive.scheduler.state.swaps:
        drive.step()
    assert drive.scheduler.state.swapping.host.num_free < 24
    for name in ("r0", "r1", "r2", "r3"):
        drive.scheduler.cancel(name)
    assert drive.scheduler.state.swapping.host.num_free == 24
    drive.finish()
    assert drive.decoder.worker.slots.empty


def test_a_swapped_out_sequence_computes_nothing_twice() -> None:
    many = capacity(num_blocks=16, num_host_blocks=24)
    drive = Drive(Scheduler(many, preemption_mode=PreemptionMode.SWAP))
    crowd(drive)
    computed = 0
    while drive.send():
        computed += drive.in_flight[-1].num_tokens
        drive.answer()
    assert computed == 4 * (12 + 29)


def test_batch_requests_wait_for_interactive_ones_and_give_way_to_them() -> None:
    drive = Drive(Scheduler(capacity(num_blocks=14, max_slots=2), policy=POLICIES["priority"]))
    drive.scheduler.add(sequence("batch", [1] * 10, 30, 0, priority=1))
    drive.step()
    drive.scheduler.add(sequence("also batch", [2] * 10, 5, 1, priority=1))
    drive.scheduler.add(sequence("interactive", [3] * 10, 30, 2))
    ended = []
    while drive.send():
        ended += [p.sequence.request_id for p in drive.answer() if p.ending is not None]
    assert ended[0] == "interactive"
    assert drive.scheduler.state.preemptions > 0
    assert drive.outputs["batch"] == generate([1] * 10, 30)


def test_by_arrival_the_older_one_keeps_its_blocks() -> None:
    drive = Drive(Scheduler(capacity(num_blocks=14, max_slots=2)))
    drive.scheduler.add(sequence("older", [1] * 10, 30, 0, priority=1))
    drive.scheduler.add(sequence("younger", [3] * 10, 30, 2))
    ended = []
    while drive.send():
        ended += [p.sequence.request_id for p in drive.answer() if p.ending is not None]
    assert ended == ["older", "younger"]
