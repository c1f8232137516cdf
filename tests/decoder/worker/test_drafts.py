"""Rows with drafts: as many tokens as drafts are right and one more, all of them those of a run without drafts."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from services.decoder.devices.base.device import Device
from services.decoder.sampling.logits_processors.token_masks import TokenMatcher
from services.decoder.sampling.sampler import Sampler
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from shared.errors import InvalidRequest
from tessera.decoder.v1.decoder_pb2 import StepPlan
from tests.decoder.parallel.test_out_of_memory import Ranks
from tests.decoder.sampling.test_token_masks import GRAMMAR, Continuations
from tests.decoder.worker.test_out_of_memory import fail_forward
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.drafted_run import (
    LENGTH,
    SLOT,
    WRONG,
    DraftedRun,
    drafted,
    require_equal_with_drafts,
    undrafted,
)
from tests.support.decoder.mixed_samples import (
    BLOCKS,
    MASK,
    PENALTY,
    PROMPTS,
    STEPS,
    Kind,
    generate,
    settings,
    tokens_of,
)
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints

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


@pytest.fixture(params=LOADS)
def worker(
    llama_folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Worker:
    def make_sampler(
        device: Device, max_slots: int, vocab_size: int, matcher: TokenMatcher | None = None
    ) -> Sampler:
        return Sampler(max_slots, vocab_size, Continuations())

    monkeypatch.setattr(Device, "make_sampler", make_sampler)
    found: Worker = LOADS[request.param](settings(llama_folder)).worker
    return found


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_tokens_are_those_of_a_run_without_drafts(worker: Worker, kind: Kind) -> None:
    require_equal_with_drafts(worker, kind)


def test_what_drafts_left_in_the_cache_changes_no_bit(worker: Worker) -> None:
    """Log-probabilities are those of a cache that never held another token."""
    kind = KINDS["log-probabilities"]
    results = undrafted(worker, kind)
    expected = [token for [token] in tokens_of(results)]
    run = drafted(worker, kind, expected)
    own = np.concatenate([np.frombuffer(r.logprobs, "<f4") for r in run.results])
    best = np.concatenate([np.frombuffer(r.top_logprobs, "<f4") for r in run.results])
    assert own[~np.isnan(own)][:STEPS].tobytes() == b"".join(r.logprobs for r in results)
    kept = best[~np.isnan(best)][: 2 * STEPS]
    assert kept.tobytes() == b"".join(r.top_logprobs for r in results)


def test_others_in_the_step_get_one_token_each(worker: Worker) -> None:
    kind, beside = KINDS["drawn with a penalty"], (0, 3)
    expected = [token for [token] in tokens_of(undrafted(worker, kind))]
    others = tokens_of(generate(worker, {slot: {} for slot in beside}))
    run = drafted(worker, kind, expected, beside)
    assert run.tokens[: len(expected)] == expected
    for result, found in zip(run.results, others, strict=False):
        assert read_ints(result.tokens)[1:3] == found


def test_nothing_is_accepted_behind_a_token_that_ends_the_sequence(worker: Worker) -> None:
    expected = [token for [token] in tokens_of(undrafted(worker, {}))]
    stop = expected[2]
    first = expected.index(stop)
    run = DraftedRun(worker, {"stop_token_ids": [stop]})
    result = run.step(expected[: first + 2])
    assert run.tokens == expected[: first + 1]
    assert read_ints(result.accepted) == [first + 1]


def test_where_no_token_is_left_the_accepted_ones_count(worker: Worker) -> None:
    """Both ids that are allowed are used up by the third place."""
    kind = {"allowed_token_ids": [7, 9], "no_repeat_ngram_size": 1}
    run = DraftedRun(worker, kind)
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
    expected = [token for [token] in tokens_of(undrafted(worker, {}))]
    run = DraftedRun(worker, {})
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
    run = DraftedRun(worker, {})
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
    one, _ = ranks.both(lambda worker: undrafted(worker, kind))
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
    run = DraftedRun(worker, {})
    run.step([])
    plan = run.plan([WRONG])
    spoil(plan)
    with pytest.raises(InvalidRequest, match="draft_"):
        worker.step(read_plan(plan, worker.limits), run.results.append)
