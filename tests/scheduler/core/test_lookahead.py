"""Drafts: how many rows have, and that tokens are those without, whatever becomes of their sequences meanwhile."""

from typing import Any

import pytest

from services.scheduler.core.budget import AttentionKind
from services.scheduler.core.planner import PreemptionMode
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import EndReason, Sequence
from tests.support.arithmetic.drive import Drive, capacity, sequence
from tests.support.arithmetic.model import generate
from tests.support.arithmetic.worker import Guessing

PROMPT = [5, 6, 7]


def drive(accuracy: float = 1.0, mode: Any = PreemptionMode.AUTO, **changes: int) -> Drive:
    limits = capacity(AttentionKind.CAUSAL, max_drafts=3, **changes)
    return Drive(Scheduler(limits, preemption_mode=mode), accuracy)


def run(one: Drive, *sequences: Sequence) -> None:
    assert one.scheduler.add(*sequences) is None
    one.finish()


@pytest.mark.parametrize("accuracy", [0.01, 0.5, 0.9, 1.0])
def test_drafts_change_speed_alone(accuracy: float) -> None:
    one = drive(accuracy)
    run(one, sequence("r", PROMPT, 100))
    assert one.outputs["r"] == generate(PROMPT, 100)
    assert one.endings["r"] is EndReason.LENGTH
    worker = one.decoder.worker
    assert worker.drafts_right + worker.drafts_wrong > 0
    assert one.steps <= 103
    if accuracy == 1.0:
        assert worker.drafts_wrong == 0
        assert one.steps < 40
    assert one.scheduler.state.blocks.num_used == 0


def test_what_was_right_is_counted_by_place() -> None:
    one = drive(0.8)
    run(one, sequence("r", PROMPT, 150))
    found = one.scheduler.lookahead
    assert found is not None
    worker = one.decoder.worker
    assert sum(found.accepted) == worker.drafts_right
    assert found.tokens >= worker.drafts_right + worker.drafts_wrong
    assert found.rows >= found.accepted[0] >= found.accepted[1] >= found.accepted[2] > 0


def test_a_stop_token_in_the_middle_of_drafts_ends_the_sequence() -> None:
    output = generate(PROMPT, 60)
    for place in range(20, 28):
        stop = output[place]
        first = output.index(stop)
        one = drive()
        run(one, sequence("r", PROMPT, 60, stop_token_ids=frozenset([stop])))
        assert one.outputs["r"] == output[: first + 1]
        assert one.endings["r"] is EndReason.STOP


class _Stops:
    """Stands for a stop string that ends with a token."""

    def __init__(self, at: int) -> None:
        self._left = at

    def push(self, token_id: int) -> Any:
        self._left -= 1
        return None if self._left else type("Stop", (), {"stop": "x", "cut_bytes": 1})()


@pytest.mark.parametrize("at", range(10, 15))
def test_what_comes_behind_a_stop_string_is_dropped(at: int) -> None:
    one = drive()
    run(one, sequence("r", PROMPT, 60, stop_search=_Stops(at)))
    assert one.outputs["r"] == generate(PROMPT, at)
    assert one.endings["r"] is EndReason.STOP
    assert one.decoder.worker.slots.empty


@pytest.mark.parametrize("count", range(1, 14))
def test_the_most_tokens_are_never_exceeded(count: int) -> None:
    one = drive()
    run(one, sequence("r", PROMPT, count))
    assert one.outputs["r"] == generate(PROMPT, count)


def test_choices_have_drafts_of_their_own() -> None:
    one = drive()
    run(one, *[sequence("r", PROMPT, 40, choice=c) for c in range(4)])
    for c in range(4):
        assert one.outputs_of["r", c] == generate(PROMPT, 40, c)
    assert one.steps < 33


@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("accuracy", [0.6, 1.0])
def test_preempted_sequences_go_on_from_what_they_have(
    mode: PreemptionMode, accuracy: float
) -> None:
    one = drive(accuracy, mode, num_blocks=16, max_batched_tokens=16, num_host_blocks=24)
    prompts = {f"r{i}": [10 * i + j for j in range(1, 13)] for i in range(4)}
    for arrival, (name, prompt) in enumerate(prompts.items()):
        assert one.scheduler.add(sequence(name, prompt, 30, arrival)) is None
    one.finish()
    for name, prompt in prompts.items():
        assert one.outputs[name] == generate(prompt, 30)
    state = one.scheduler.state
    assert state.preemptions > 0
    assert state.blocks.num_used == 0 and state.swapping.host.num_free == 24
    assert one.decoder.worker.drafts_right > 0


def _steps(costs: Any, streams: int, accuracy: float, count: int = 180) -> tuple[Drive, int]:
    """Runs streams where a step of so many tokens takes `costs(tokens)`. Returns how many drafts were run."""
    one = drive(accuracy, num_blocks=600, max_slots=16, max_batched_tokens=64, max_model_len=300)
    scheduler = one.scheduler
    learn = scheduler.learn

    def measured(plan: Any, output: Any, took: float) -> None:
        del took
        drafted = sum(output.drafted)
        learn(plan, output, costs(plan.num_tokens - sum(plan.row_drafts) + drafted))

    scheduler.learn = measured  # type: ignore[method-assign]
    for number in range(streams):
        assert scheduler.add(sequence(f"r{number}", [number, 2, 3], count, number)) is None
    one.finish()
    assert scheduler.lookahead is not None
    return one, scheduler.lookahead.tokens


def test_where_tokens_cost_as_much_as_steps_there_are_hardly_any() -> None:
    _, drafted = _steps(lambda tokens: 100.0 * tokens, 8, 0.7)
    assert drafted < 8 * 180 / 16


def test_where_drafts_are_never_right_there_are_hardly_any() -> None:
    one, drafted = _steps(lambda tokens: 1000.0 + 30 * tokens, 4, 0.001)
    assert drafted < 4 * 180 / 8
    assert one.steps < 190


def test_where_no_draft_is_found_most_plans_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    one = drive(num_blocks=600, max_slots=16, max_batched_tokens=64, max_model_len=300)
    monkeypatch.setattr(Guessing, "propose", lambda *_: [])
    asked = 0
    planned = one.scheduler.plan

    def plan() -> Any:
        nonlocal asked
        found = planned()
        asked += found is not None and any(found.row_drafts)
        return found

    one.scheduler.plan = plan  # type: ignore[method-assign]
    run(one, *[sequence("r", PROMPT, 180, choice=c) for c in range(4)])
    assert one.steps >= 180
    assert 180 / 16 < asked < 180 / 4


def test_where_a_step_is_cheap_up_to_four_tokens_it_has_four() -> None:
    one, drafted = _steps(lambda tokens: 1000.0 if tokens <= 4 else 1000.0 * tokens, 1, 1.0)
    assert drafted > 100
    assert one.steps < 70
    _, drafted = _steps(lambda tokens: 1000.0 if tokens <= 4 else 1000.0 * tokens, 4, 1.0)
    assert drafted < 4 * 180 / 8
