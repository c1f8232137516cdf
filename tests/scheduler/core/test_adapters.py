"""Adapters that plans load: who waits for one, who keeps one, and whose place another gets."""

from typing import Any

import pytest

from services.scheduler.core.budget import Capacity
from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import EndReason, Error, Sequence

FOLDER = "/adapters/x"


def scheduler(places: int = 1, **changes: Any) -> Scheduler:
    values: dict[str, Any] = {
        "num_blocks": 65,
        "block_size": 4,
        "max_slots": 8,
        "max_model_len": 100,
        "max_batched_tokens": 64,
        "max_adapters": places,
    }
    return Scheduler(Capacity(**{**values, **changes}))


class Decoder:
    """Answers the plans of a core; every token is 1."""

    def __init__(self, core: Scheduler) -> None:
        self.core = core
        self.arrivals = 0
        self.loads: list[str] = []
        self.unloads: list[str] = []

    def add(self, lora_id: str, max_tokens: int = 2, folder: str = FOLDER) -> Sequence:
        self.arrivals += 1
        name = f"r{self.arrivals}"
        sequence = Sequence(name, [1, 2, 3], 3, max_tokens, arrival=self.arrivals, lora_id=lora_id)
        sequence.lora_folder = folder
        assert self.core.add(sequence) is None
        return sequence

    def step(self) -> StepPlan | None:
        """One plan and its answer; what it loads is there at once."""
        plan = self.core.plan()
        if plan is None:
            return None
        self.loads += [lora_id for lora_id, _ in plan.load_adapters]
        self.unloads += plan.unload_adapters
        self.core.complete(StepOutput([1] * len(plan.samples)))
        for lora_id, _ in plan.load_adapters:
            self.core.adapter_loaded(lora_id)
        return plan

    def work(self) -> None:
        for _ in range(100):
            if self.step() is None:
                return
        pytest.fail("there is no end of plans")


def test_a_sequence_starts_once_its_adapter_is_there_and_holds_up_no_other() -> None:
    core = scheduler()
    decoder = Decoder(core)
    adapted, plain = decoder.add("a"), decoder.add("")
    plan = core.plan()
    assert plan is not None
    assert plan.load_adapters == [("a", FOLDER)]
    assert plan.row_sequence == [plain]
    core.complete(StepOutput([1]))
    assert (following := core.plan()) is not None and following.row_sequence == [plain]
    core.complete(StepOutput([1]))
    decoder.work()
    assert plain.ended and adapted.output == []
    core.adapter_loaded("a")
    decoder.work()
    assert adapted.ended and adapted.num_output_tokens == 2


def test_what_has_been_loaded_is_loaded_once() -> None:
    decoder = Decoder(scheduler(2))
    for lora_id in ("a", "b", "a", "b", "a"):
        decoder.add(lora_id)
        decoder.work()
    assert (decoder.loads, decoder.unloads) == (["a", "b"], [])


def test_what_was_used_longest_ago_makes_room() -> None:
    decoder = Decoder(scheduler(2))
    for lora_id in ("a", "b", "a", "c", "b"):
        decoder.add(lora_id)
        decoder.work()
    assert decoder.loads == ["a", "b", "c", "b"]
    assert decoder.unloads == ["b", "a"]


def test_a_sequence_that_has_started_keeps_its_adapter() -> None:
    decoder = Decoder(scheduler(1))
    first = decoder.add("a", max_tokens=9)
    decoder.step()
    second = decoder.add("b")
    while not first.ended:
        assert decoder.step() is not None
        assert decoder.unloads == [] or first.ended
    decoder.work()
    assert second.ended and decoder.unloads == ["a"]


def test_sequences_that_come_later_do_not_keep_one_waiting_for_good() -> None:
    """Without an end of requests for one adapter the other one gets its turn all the same."""
    decoder = Decoder(scheduler(1))
    decoder.add("a", max_tokens=3)
    decoder.step()
    other = decoder.add("b")
    for _ in range(40):
        decoder.add("a", max_tokens=3)
        decoder.step()
        if other.ended:
            return
    pytest.fail("it never had its turn")


def test_adapters_are_given_places_by_rank() -> None:
    """Those of waiting sequences are not read in turn, one in the place of the other, before any has started."""
    decoder = Decoder(scheduler(1, max_slots=1))
    running = decoder.add("", max_tokens=6)
    decoder.step()
    decoder.add("a"), decoder.add("b")
    while not running.ended:
        decoder.step()
    assert (decoder.loads, decoder.unloads) == (["a"], [])
    decoder.work()
    assert (decoder.loads, decoder.unloads) == (["a", "b"], ["a"])


def test_an_adapter_that_cannot_be_read_ends_those_that_wait_for_it_alone() -> None:
    core = scheduler(2)
    decoder = Decoder(core)
    lost, other = decoder.add("a"), decoder.add("b")
    plan = core.plan()
    assert plan is not None
    core.complete(StepOutput([]))
    [progress] = core.adapter_failed("a", Error("ADAPTER_CHANGED", "other weights"))
    assert progress.sequence is lost
    assert progress.ending is not None and progress.ending.reason is EndReason.ERROR
    core.adapter_loaded("b")
    decoder.work()
    assert other.num_output_tokens == 2 and decoder.unloads == ["a"]
    again = decoder.add("a")
    decoder.work()
    assert again.num_output_tokens == 2


def test_what_is_read_early_takes_no_place_that_is_needed() -> None:
    core = scheduler(1)
    decoder = Decoder(core)
    needed = decoder.add("a", max_tokens=5)
    core.state.adapters.read_early("b", FOLDER)
    while not needed.ended:
        decoder.step()
    assert decoder.loads[0] == "a" and not decoder.unloads
    decoder.work()
    assert decoder.loads == ["a", "b"]


def test_what_an_earlier_binding_has_left_is_used_and_makes_room() -> None:
    core = scheduler(1)
    core.state.adapters.adopt(["a"])
    decoder = Decoder(core)
    for lora_id in ("a", "b"):
        decoder.add(lora_id)
        decoder.work()
    assert (decoder.loads, decoder.unloads) == (["b"], ["a"])


def test_an_adapter_that_nobody_can_load_ends_its_sequence() -> None:
    for core, folder in ((scheduler(0), FOLDER), (scheduler(1), "")):
        sequence = Sequence("r", [1, 2], 2, 2, lora_id="a", lora_folder=folder)
        ending = core.add(sequence)
        assert ending is not None and ending.error is not None
        assert ending.error.reason == "ADAPTER_CHANGED"
