"""Blocks for keys of pictures that layers attend to: sequences wait for them, share them where their pictures are the
same, and give them back."""

from typing import Any

import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import MediaSpan, Sequence
from tests.support.arithmetic.drive import Drive, capacity, sequence

ROWS = 40
BLOCKS = -(-ROWS // capacity().block_size)  # of a picture


def started(pictures: int = 2, **changes: Any) -> Scheduler:
    """With blocks for so many pictures."""
    limits = {"num_encoder_blocks": pictures * BLOCKS, "has_state": True, **changes}
    return Scheduler(capacity(**limits))


def with_picture(name: str, *pictures: int, **changes: Any) -> Sequence:
    """A prompt with these pictures, one token each."""
    spans = tuple(
        MediaSpan(bytes([picture]) * 16, 4 + place, 1, ROWS)
        for place, picture in enumerate(pictures)
    )
    prompt = [1, 2, 3, 4, *[9] * len(pictures), 5, 6]
    return sequence(name, prompt, 3, media=spans, **changes)


def encode(scheduler: Scheduler, drive: Drive) -> None:
    """All pictures that are wanted arrive."""
    while wanted := scheduler.state.media.take_wanted():
        for span in wanted:
            scheduler.embeddings_encoded(span.digest, span.digest)
        drive.send()
        drive.answer()
        for span in wanted:
            scheduler.embeddings_ready(span.digest)


def rows_of(scheduler: Scheduler) -> list[str]:
    plan = scheduler.plan()
    return [] if plan is None else [row.sequence.request_id for row in plan.rows]


def test_nothing_is_computed_before_all_pictures_are_there() -> None:
    scheduler = started()
    drive = Drive(scheduler)
    assert scheduler.add(with_picture("r", 1, 2)) is None
    first, second = scheduler.state.media.take_wanted()
    scheduler.embeddings_encoded(first.digest, "one")
    drive.send()
    assert not drive.in_flight[-1].rows
    drive.answer()
    scheduler.embeddings_ready(first.digest)
    assert scheduler.state.num_ready_to_start == 0
    scheduler.embeddings_encoded(second.digest, "two")
    drive.send()
    drive.answer()
    scheduler.embeddings_ready(second.digest)
    assert rows_of(scheduler) == ["r"]


def test_sequences_wait_until_blocks_are_given_back() -> None:
    scheduler = started(pictures=2)
    drive = Drive(scheduler)
    for number in range(4):
        assert scheduler.add(with_picture(f"r{number}", number, arrival=number)) is None
    scheduler.add(sequence("text", [7, 8], 2, 9))
    for _ in range(6):
        encode(scheduler, drive)
        assert scheduler.state.slots.encoder_blocks.free >= 0
        running = {s.request_id for s in scheduler.state.running if s.media}
        assert len(running) <= 2
        drive.finish()
    assert scheduler.state.num_sequences == 0 and len(drive.outputs["text"]) == 2
    drive.send()
    assert scheduler.state.slots.encoder_blocks.free == 2 * BLOCKS


def test_the_same_pictures_take_blocks_once() -> None:
    scheduler = started(pictures=1)
    drive = Drive(scheduler)
    for name in ("a", "b", "c"):
        assert scheduler.add(with_picture(name, 5)) is None
    assert scheduler.add(with_picture("other", 6, arrival=9)) is None
    encode(scheduler, drive)
    drive.send()
    running = {s.request_id for s in scheduler.state.running}
    assert running == {"a", "b", "c"} and scheduler.state.slots.encoder_blocks.free == 0
    for _ in range(3):
        drive.finish()
        encode(scheduler, drive)
    assert scheduler.state.num_sequences == 0


@pytest.mark.parametrize("cancelled", [False, True])
def test_choices_share_what_their_prompt_has(cancelled: bool) -> None:
    scheduler = started(pictures=1)
    drive = Drive(scheduler)
    prompt = with_picture("r", 3)
    prompt.forks = [prompt.fork(choice) for choice in (1, 2)]
    assert scheduler.add(prompt) is None
    encode(scheduler, drive)
    if cancelled:
        scheduler.cancel("r")
    drive.finish()
    drive.send()
    assert scheduler.state.num_sequences == 0
    assert scheduler.state.slots.encoder_blocks.free == BLOCKS


def test_more_pictures_than_there_are_blocks_for_are_refused() -> None:
    ending = started(pictures=2).add(with_picture("r", 1, 2, 3))
    assert ending is not None and ending.error is not None
    error = ending.error
    assert error.reason == "TOO_MUCH_MEDIA"
    assert f"take {-(-3 * ROWS // capacity().block_size)} blocks" in error.message
