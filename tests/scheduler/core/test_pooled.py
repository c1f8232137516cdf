"""Prompts that become vectors, beside sequences that generate."""

from typing import Any

from services.scheduler.core.plan import Progress
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import EndReason, Sequence
from tests.support.arithmetic.drive import Drive, capacity, sequence
from tests.support.arithmetic.model import generate, state_after
from tests.support.arithmetic.worker import pooled_state

WIDTH = 3


def pooled(name: str, prompt: list[int], **more: Any) -> Sequence:
    return sequence(name, prompt, 1, pooled_width=WIDTH, **more)


def prompt_of(first: int, length: int) -> list[int]:
    return [(first + 7 * i) % 50 + 1 for i in range(length)]


def finished(drive: Drive) -> dict[str, Progress]:
    """Runs all, and gives what ended each request."""
    ended: dict[str, Progress] = {}
    while drive.send() or drive.in_flight:
        while drive.send() and len(drive.in_flight) < 2:
            pass
        for progress in drive.answer():
            if progress.ending is not None:
                ended[progress.sequence.request_id] = progress
    return ended


def test_a_prompt_in_several_steps_is_pooled_once_beside_one_that_generates() -> None:
    drive = Drive(Scheduler(capacity()))
    long, short = prompt_of(3, 70), prompt_of(5, 9)
    drive.scheduler.add(sequence("text", prompt_of(1, 12), 8))
    drive.scheduler.add(pooled("long", long, arrival=1))
    drive.scheduler.add(pooled("short", short, arrival=2))
    ended = finished(drive)
    assert drive.outputs["text"] == generate(prompt_of(1, 12), 8)
    for name in ("long", "short"):
        progress = ended[name]
        assert progress.ending is not None and progress.ending.reason is EndReason.STOP
        assert (progress.token, progress.start, progress.pool >= 0) == (None, 0, True)
    assert drive.vectors_of == {
        "long": pooled_state(state_after(long), WIDTH),
        "short": pooled_state(state_after(short), WIDTH),
    }
    assert drive.scheduler.state.blocks.num_used == 0
    assert drive.decoder.worker.slots.empty


def test_a_prefix_is_found_again_unless_every_token_counts() -> None:
    drive = Drive(Scheduler(capacity()))
    prompt = prompt_of(2, 40)
    drive.scheduler.add(pooled("first", prompt))
    finished(drive)
    again, mean = pooled("again", prompt), pooled("mean", prompt, reads_prompt=True)
    drive.scheduler.add(again)
    drive.scheduler.add(mean)
    finished(drive)
    assert (again.num_cached_tokens, mean.num_cached_tokens) == (36, 0)
    assert drive.vectors_of["first"] == drive.vectors_of["again"] == drive.vectors_of["mean"]


def test_a_failed_row_ends_its_request_alone() -> None:
    drive = Drive(Scheduler(capacity()))
    drive.scheduler.add(pooled("wrong", prompt_of(1, 8)))
    drive.scheduler.add(pooled("right", prompt_of(2, 8), arrival=1))
    drive.send()
    drive.answer(failing_rows=[0])
    finished(drive)
    assert drive.endings == {"wrong": EndReason.ERROR, "right": EndReason.STOP}
    assert set(drive.vectors_of) == {"right"}


def test_one_that_is_cancelled_in_flight_gives_nothing() -> None:
    drive = Drive(Scheduler(capacity()))
    drive.scheduler.add(pooled("gone", prompt_of(1, 8)))
    drive.send()
    drive.scheduler.cancel("gone")
    assert drive.answer() == []
    finished(drive)
    assert drive.vectors_of == {} and drive.decoder.worker.slots.empty


def test_few_blocks_preempt_and_change_no_vector() -> None:
    drive = Drive(Scheduler(capacity(num_blocks=24)))
    prompts = {f"r{i}": prompt_of(i, 30 + 7 * i) for i in range(5)}
    drive.scheduler.add(sequence("text", prompt_of(9, 20), 40))
    for place, (name, prompt) in enumerate(prompts.items(), 1):
        drive.scheduler.add(pooled(name, prompt, arrival=place, reads_prompt=place % 2 == 0))
    finished(drive)
    assert drive.outputs["text"] == generate(prompt_of(9, 20), 40)
    expected = {name: pooled_state(state_after(p), WIDTH) for name, p in prompts.items()}
    assert drive.vectors_of == expected
