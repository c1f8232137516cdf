"""Rows with drafts: as many tokens as drafts are right and one more, all of them those of a run without drafts."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.decoder.devices.base.device import Device
from services.decoder.sampling.sampler import Sampler
from services.decoder.worker.plan import read_plan
from services.decoder.worker.worker import Worker
from shared.errors import InvalidRequest
from tessera.decoder.v1.decoder_pb2 import StepPlan, StepResult
from tests.decoder.parallel.test_out_of_memory import Ranks
from tests.decoder.sampling.test_token_masks import GRAMMAR, Continuations
from tests.decoder.worker.test_mixed_samples import (
    BLOCKS,
    MASK,
    PENALTY,
    PROMPTS,
    STEPS,
    generate,
    settings,
    tokens_of,
)
from tests.decoder.worker.test_out_of_memory import fail_forward
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints

Kind = dict[str, Any]
DRAWN = {"temperature": 0.9, "top_p": 0.95}
KINDS: dict[str, Kind] = {
    "greedy": {},
    "drawn": DRAWN,
    "penalty": PENALTY,
    "drawn with a penalty": {**DRAWN, **PENALTY, "logprobs": 1},
    "mask": MASK,
    "no token twice": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words": [{"ids": [n, n + 1]} for n in range(0, 400, 2)], **DRAWN},
    "least tokens": {"min_tokens": STEPS, "stop_token_ids": list(range(0, 400, 2))},
    "log-probabilities": {"logprobs": 2},
    "grammar": {"grammar": GRAMMAR},
}
SLOT = 1
LENGTH = len(PROMPTS[SLOT])
WRONG = 399  # chosen in none of the runs


def right_and_wrong(known: Sequence[int], step: int) -> list[int]:
    """Drafts of which `step % 4` are right, and mostly one is not."""
    right = list(known[: step % 4])
    return right if step % 3 == 0 else [*right, WRONG]


class Run:
    """A sequence at the slot SLOT, one plan at a time."""

    def __init__(self, worker: Worker, kind: Kind, beside: Sequence[int] = ()) -> None:
        self.worker, self.beside = worker, list(beside)
        self.tokens: list[int] = []
        self.results: list[StepResult] = []
        self.lengths = {slot: len(PROMPTS[slot]) for slot in self.beside}
        slots = [SLOT, *self.beside]
        kinds = {SLOT: kind, **{slot: {} for slot in self.beside}}
        self.opening = {
            "new": [introduce(Text(s, PROMPTS[s], greedy(seed=s, **kinds[s]))) for s in slots],
            "edit_slot": slots,
            "edit_index": [0] * len(slots),
            "edit_len": [BLOCKS] * len(slots),
            "edit_blocks": [1 + BLOCKS * slot + n for slot in slots for n in range(BLOCKS)],
        }

    def plan(self, drafts: Sequence[int]) -> StepPlan:
        """The next step, with drafts for SLOT alone; the first one computes the prompts as well."""
        at, first, count = len(self.results), LENGTH + len(self.tokens), len(drafts)
        others = self.beside
        starts = [first - 1, *(self.lengths[s] + at - 1 for s in others)]
        fields: dict[str, Any] = {
            "step": at + 1,
            "row_slot": [SLOT, *others],
            "row_start": starts if at else [0] * (1 + len(others)),
            "row_count": [1 + count] + [1] * len(others),
            # Those of one row need not stand together.
            "sample_row": [0, *range(1, 1 + len(others)), *[0] * count],
            "sample_slot": [SLOT, *others, *[SLOT] * count],
            "draft_slot": [SLOT] * count,
            "draft_token": list(drafts),
        }
        if not at:
            fields["row_count"] = [LENGTH + count, *self.lengths.values()]
            fields |= self.opening
        return make_plan(**fields)

    def step(self, drafts: Sequence[int]) -> StepResult:
        """Runs it; the tokens of SLOT are added."""
        plan = read_plan(self.plan(drafts), self.worker.limits)
        self.worker.step(plan, self.results.append)
        result = self.results[-1]
        assert not result.failed, result.failed
        self.tokens += [
            token
            for slot, token in zip(plan.sample_slot, read_ints(result.tokens), strict=True)
            if slot == SLOT and token >= 0
        ]
        return result


def drafted(worker: Worker, kind: Kind, expected: Sequence[int], beside: Sequence[int] = ()) -> Run:
    """Until as many tokens as `expected` are there, which are what is drafted."""
    run = Run(worker, kind, beside)
    while len(run.tokens) < len(expected):
        at = len(run.tokens)
        drafts = right_and_wrong(expected[at:], len(run.results))
        result = run.step(drafts)
        right = 0
        while right < len(drafts) and drafts[right] == (*expected, None, None)[at + right]:
            right += 1
        if drafts:
            assert read_ints(result.accepted) == [right]
        else:
            assert not result.accepted
        assert len(run.tokens) == at + right + 1
    return run


def alone(worker: Worker, kind: Kind) -> list[StepResult]:
    """A run without drafts."""
    return generate(worker, {SLOT: kind})


@pytest.fixture(params=LOADS)
def worker(
    llama_folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Worker:
    def make_sampler(device: Device, max_slots: int, vocab_size: int) -> Sampler:
        return Sampler(max_slots, vocab_size, Continuations())

    monkeypatch.setattr(Device, "make_sampler", make_sampler)
    found: Worker = LOADS[request.param](settings(llama_folder)).worker
    return found


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_tokens_are_those_of_a_run_without_drafts(worker: Worker, kind: Kind) -> None:
    expected = [token for [token] in tokens_of(alone(worker, kind))]
    run = drafted(worker, kind, expected)
    assert run.tokens[: len(expected)] == expected
    assert len(run.results) < STEPS


def test_what_drafts_left_in_the_cache_changes_no_bit(worker: Worker) -> None:
    """Log-probabilities are those of a cache that never held another token."""
    kind = KINDS["log-probabilities"]
    results = alone(worker, kind)
    expected = [token for [token] in tokens_of(results)]
    run = drafted(worker, kind, expected)
    own = np.concatenate([np.frombuffer(r.logprobs, "<f4") for r in run.results])
    best = np.concatenate([np.frombuffer(r.top_logprobs, "<f4") for r in run.results])
    assert own[~np.isnan(own)][:STEPS].tobytes() == b"".join(r.logprobs for r in results)
    kept = best[~np.isnan(best)][: 2 * STEPS]
    assert kept.tobytes() == b"".join(r.top_logprobs for r in results)


def test_others_in_the_step_get_one_token_each(worker: Worker) -> None:
    kind, beside = KINDS["drawn with a penalty"], (0, 3)
    expected = [token for [token] in tokens_of(alone(worker, kind))]
    others = tokens_of(generate(worker, {slot: {} for slot in beside}))
    run = drafted(worker, kind, expected, beside)
    assert run.tokens[: len(expected)] == expected
    for result, found in zip(run.results, others, strict=False):
        assert read_ints(result.tokens)[1:3] == found


def test_nothing_is_accepted_behind_a_token_that_ends_the_sequence(worker: Worker) -> None:
    expected = [token for [token] in tokens_of(alone(worker, {}))]
    stop = expected[2]
    first = expected.index(stop)
    run = Run(worker, {"stop_token_ids": [stop]})
    result = run.step(expected[: first + 2])
    assert run.tokens == expected[: first + 1]
    assert read_ints(result.accepted) == [first + 1]


def test_where_no_token_is_left_the_accepted_ones_count(worker: Worker) -> None:
    """Both ids that are allowed are used up by the third place."""
    kind = {"allowed_token_ids": [7, 9], "no_repeat_ngram_size": 1}
    run = Run(worker, kind)
    [first] = read_ints(run.step([]).tokens)
    plan = read_plan(run.plan([7 + 9 - first, 5]), worker.limits)
    worker.step(plan, run.results.append)
    result = run.results[-1]
    assert read_ints(result.tokens) == [7 + 9 - first, -1, -1]
    assert read_ints(result.accepted) == [1]
    assert [failed.failure.reason for failed in result.failed] == ["NO_TOKEN_LEFT"]


def test_a_step_that_is_prepared_anew_has_its_drafts_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [token for [token] in tokens_of(alone(worker, {}))]
    run = Run(worker, {})
    run.step([])
    message = run.plan(expected[1:4])
    prompt = PROMPTS[3] * 2
    other = make_plan(
        new=[introduce(Text(3, prompt, greedy()))],
        edit_slot=[3],
        edit_index=[0],
        edit_len=[BLOCKS],
        edit_blocks=[1 + BLOCKS * 3 + n for n in range(BLOCKS)],
        row_slot=[3],
        row_start=[0],
        row_count=[len(prompt)],
        sample_row=[1],
        sample_slot=[3],
    )
    for column in ("row_slot", "row_start", "row_count", "sample_row", "sample_slot"):
        setattr(other, column, getattr(message, column) + getattr(other, column))
    message.MergeFrom(other)
    fail_forward(worker, monkeypatch, lambda tokens: tokens > len(prompt))
    worker.step(read_plan(message, worker.limits), run.results.append)
    result = run.results[-1]
    assert [failed.row for failed in result.failed] == [1]
    assert read_ints(result.tokens) == [*expected[1:5], -1]
    run.tokens += expected[1:5]
    assert read_ints(run.step([]).tokens) == [expected[5]]


def test_what_changes_a_slot_waits_for_its_drafts(llama_folder: Path) -> None:
    worker: Worker = LOADS["deferred"](settings(llama_folder)).worker
    run = Run(worker, {})
    run.step([])
    step = worker.launch(read_plan(run.plan([WRONG]), worker.limits))
    for fields in (
        {"row_slot": [SLOT], "row_start": [LENGTH + 1], "row_count": [1]},
        {"drop": [SLOT]},
        {"edit_slot": [SLOT], "edit_index": [0], "edit_len": [1], "edit_blocks": [1]},
        {"fork_child": [5], "fork_parent": [SLOT], "fork_choice": [1]},
    ):
        assert step.must_precede(read_plan(make_plan(step=3, **fields), worker.limits)), fields
    assert not step.must_precede(read_plan(make_plan(step=3, drop=[0]), worker.limits))
    worker.collect(step, run.results.append)
    assert read_ints(run.results[-1].accepted) == [0]


@pytest.fixture
def ranks(llama_folder: Path) -> Iterator[Ranks]:
    with ThreadPoolExecutor(2) as pool:
        yield Ranks(llama_folder, pool)


@pytest.mark.parametrize("kind", [{}, {**DRAWN, **PENALTY}], ids=str)
def test_ranks_accept_the_same(ranks: Ranks, kind: Kind) -> None:
    one, _ = ranks.both(lambda worker: alone(worker, kind))
    expected = [token for [token] in tokens_of(one)]
    runs = ranks.both(lambda worker: drafted(worker, kind, expected))
    assert [run.tokens[: len(expected)] for run in runs] == [expected, expected]
    assert [r.accepted for r in runs[0].results] == [r.accepted for r in runs[1].results]


def _without_a_row(plan: StepPlan) -> None:
    plan.draft_slot = np.array([0], "<i4").tobytes()


def _without_samples(plan: StepPlan) -> None:
    plan.sample_row, plan.sample_slot = plan.sample_row[:4], plan.sample_slot[:4]


def _of_another_slot(plan: StepPlan) -> None:
    plan.sample_slot = plan.sample_slot[:4] + np.array([0], "<i4").tobytes()


def _of_nothing_else(plan: StepPlan) -> None:
    plan.row_count = np.array([1], "<i4").tobytes()


def _outside_the_vocabulary(plan: StepPlan) -> None:
    plan.draft_token = np.array([1 << 20], "<i4").tobytes()


@pytest.mark.parametrize(
    "spoil",
    [_without_a_row, _without_samples, _of_another_slot, _of_nothing_else, _outside_the_vocabulary],
)
def test_a_plan_with_drafts_that_fit_nothing_is_refused(
    worker: Worker, spoil: Callable[[StepPlan], None]
) -> None:
    run = Run(worker, {})
    run.step([])
    plan = run.plan([WRONG])
    spoil(plan)
    with pytest.raises(InvalidRequest, match="draft_"):
        worker.step(read_plan(plan, worker.limits), run.results.append)
