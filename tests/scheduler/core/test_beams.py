"""Beam search in the core: whatever the schedule, the hypotheses are those of a search that is alone."""

from typing import Any

import pytest

from services.scheduler.core.beams import BeamSearch
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from tests.support.arithmetic.drive import Drive, capacity, search_alone, sequence
from tests.support.arithmetic.model import MODEL, generate, state_after


def beam_search(**changes: object) -> BeamSearch[Sequence]:
    values = {"num_beams": 4, "max_tokens": 12, "stop_token_ids": frozenset({9, 40})}
    return BeamSearch(**{**values, **changes})  # type: ignore[arg-type]


def add(drive: Drive, name: str, prompt: list[int], arrival: int = 0, **changes: object) -> None:
    search = beam_search(**changes)
    first = sequence(
        name, prompt, search.max_tokens, arrival, beams=search, num_logprobs=search.num_top
    )
    assert drive.scheduler.add(first) is None


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("penalty", [1.0, 0.3, 2.0, -1.0])
@pytest.mark.parametrize("beams", [1, 3, 4])
def test_the_hypotheses_are_those_of_a_search_alone(
    beams: int, penalty: float, early: bool
) -> None:
    options = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
    drive = Drive(Scheduler(capacity(max_slots=12)))
    prompts = {f"r{i}": [i + 1] * (2 + 5 * i) for i in range(3)}
    for arrival, (name, prompt) in enumerate(prompts.items()):
        add(drive, name, prompt, arrival, **options)
    drive.finish()
    for name, prompt in prompts.items():
        expected = search_alone(prompt, beam_search(**options))
        assert tokens(drive.found[name]) == tokens(expected)
        assert [h.score for h in drive.found[name]] == [h.score for h in expected]
    assert drive.scheduler.state.blocks.num_used == drive.scheduler.state.num_sequences == 0
    assert drive.decoder.worker.slots.empty


def tokens(found: list[Any]) -> list[list[int]]:
    return [[step.token for step in h.steps()] for h in found]


def test_no_stop_id_ends_a_beam_before_the_least_number_of_tokens() -> None:
    drive = Drive(Scheduler(capacity()))
    prompt = [3, 1, 4]
    stops = frozenset(t for t, _ in MODEL.top(state_after(prompt), 3))
    add(drive, "r", prompt, stop_token_ids=stops, min_tokens=3)
    drive.finish()
    expected = search_alone(prompt, beam_search(stop_token_ids=stops, min_tokens=3))
    assert tokens(drive.found["r"]) == tokens(expected)
    assert all(len(output) >= 3 for output in tokens(drive.found["r"]))


def test_others_are_planned_ahead_while_beams_wait_for_their_answer() -> None:
    drive = Drive(Scheduler(capacity()))
    drive.scheduler.add(sequence("text", [1, 2, 3], 20))
    add(drive, "beams", [4, 5, 6], 1)
    for _ in range(4):
        drive.send()
        drive.send()
        names = [[s.request_id for s in plan.row_sequence] for plan in drive.in_flight[-2:]]
        assert names[1] == ["text"]
        drive.answer()
        drive.answer()
    drive.finish()
    assert drive.outputs["text"] == generate([1, 2, 3], 20)


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_searches_that_hold_all_blocks_between_them_still_end(host_blocks: int) -> None:
    drive = Drive(Scheduler(capacity(num_blocks=16, max_slots=16, num_host_blocks=host_blocks)))
    prompts = {f"r{i}": [5 * i + j for j in range(1, 12)] for i in range(3)}
    for arrival, (name, prompt) in enumerate(prompts.items()):
        add(drive, name, prompt, arrival, max_tokens=25, stop_token_ids=frozenset())
    drive.finish()
    assert drive.scheduler.state.preemptions > 0
    for name, prompt in prompts.items():
        expected = search_alone(prompt, beam_search(max_tokens=25, stop_token_ids=frozenset()))
        assert tokens(drive.found[name]) == tokens(expected)
    assert drive.scheduler.state.blocks.num_used == 0
    assert drive.scheduler.state.swapping.host.num_free == host_blocks


def test_cancel_gives_all_slots_back() -> None:
    for steps in range(5):
        drive = Drive(Scheduler(capacity()))
        add(drive, "r", [1, 2, 3, 4, 5])
        for _ in range(steps):
            if drive.send():
                drive.answer()
        drive.send()
        assert drive.scheduler.cancel("r")
        drive.finish()
        assert drive.decoder.worker.slots.empty
        for i in range(8):
            drive.scheduler.add(sequence(f"t{i}", [i], 2))
        drive.send()
        assert len(drive.in_flight[-1].row_slot) == 8


def test_a_failed_beam_ends_the_search() -> None:
    drive = Drive(Scheduler(capacity()))
    add(drive, "r", [1, 2, 3, 4, 5])
    for _ in range(3):
        drive.step()
    drive.send()
    progress = drive.answer(failing_rows=[1])
    assert [p.ending is not None for p in progress] == [True]
    assert drive.scheduler.state.num_sequences == drive.scheduler.state.blocks.num_used == 0
    drive.finish()
    assert drive.decoder.worker.slots.empty
