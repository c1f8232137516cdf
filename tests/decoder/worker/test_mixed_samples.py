"""Sequences that are chosen differently in one step: each gets what it gets alone, and what only it needs is done for
it alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.decoder.loading.load import load
from services.decoder.worker.token_choice import SampleArrays
from services.decoder.worker.worker import Worker
from shared.cpu_kernels import shortlist
from tests.decoder.parallel.test_out_of_memory import Ranks
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.mixed_samples import (
    KINDS,
    STEPS,
    Kind,
    generate,
    require_each_as_alone,
    settings,
    tokens_of,
)


@pytest.fixture(params=LOADS)
def worker(llama_folder: Path, request: pytest.FixtureRequest) -> Worker:
    found: Worker = LOADS[request.param](settings(llama_folder)).worker
    return found


@pytest.mark.parametrize("kinds", KINDS)
def test_each_gets_what_it_gets_alone(worker: Worker, kinds: list[Kind]) -> None:
    require_each_as_alone(worker, kinds)
    together = generate(worker, dict(enumerate(kinds)))
    for slot, kind in enumerate(kinds):
        if "logprobs" in kind:
            alone = generate(worker, {slot: kind})
            assert [r.top_logprobs for r in together] == [r.top_logprobs for r in alone]


def test_only_logits_that_the_host_needs_come_to_it(llama_folder: Path) -> None:
    worker = LOADS["deferred"](settings(llama_folder)).worker
    seen: list[SampleArrays] = []
    finish = worker._collecting._choice.finish

    def look(step: Any, arrived: Any, kept: Any, later: Any) -> Any:
        seen.append(SampleArrays.of(step.split, arrived))
        return finish(step, arrived, kept, later)

    worker._collecting._choice.finish = look  # type: ignore[method-assign]
    generate(worker, dict(enumerate(KINDS[2])))
    for arrays in seen:
        assert arrays.tokens is not None and len(arrays.tokens) == 4
        assert len(arrays.logits) == 2  # of the penalty and of the log-probabilities


@pytest.fixture
def _sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small output matrices too."""
    monkeypatch.setattr(shortlist, "LEAST_BYTES", 0)


@pytest.mark.usefixtures("_sketched")
@pytest.mark.parametrize("kinds", KINDS[:2])
def test_masks_and_penalties_leave_the_sketch_in_use(
    llama_folder: Path, kinds: list[Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    sketched = load(settings(llama_folder)).worker
    monkeypatch.setattr(shortlist, "LEAST_BYTES", 1 << 40)
    whole = load(settings(llama_folder)).worker
    assert (sketched._model.sketched_rows, whole._model.sketched_rows) == (4, 0)
    counts: dict[str, list[int]] = {}
    for name, worker in (("sketched", sketched), ("whole", whole)):
        rows = counts.setdefault(name, [])
        logits = worker._model.logits

        def count(hidden: Any, logits: Any = logits, rows: list[int] = rows) -> Any:
            rows.append(len(hidden))
            return logits(hidden)

        monkeypatch.setattr(worker._model, "logits", count)
    found = [tokens_of(generate(worker, dict(enumerate(kinds)))) for worker in (sketched, whole)]
    assert found[0] == found[1]
    assert counts["whole"] == [4] * STEPS
    assert sum(counts["sketched"]) < sum(counts["whole"])
    assert min(counts["sketched"], default=1) < 4, "of the rows alone whose guess was wrong"


@pytest.fixture
def ranks(_sketched: None, llama_folder: Path) -> Iterator[Ranks]:
    with ThreadPoolExecutor(2) as pool:
        yield Ranks(llama_folder, pool)


@pytest.mark.parametrize("kinds", KINDS)
def test_ranks_choose_the_same_in_the_same_way(
    ranks: Ranks, llama_folder: Path, kinds: list[Kind]
) -> None:
    one, other = ranks.both(lambda worker: generate(worker, dict(enumerate(kinds))))
    assert tokens_of(one) == tokens_of(other)
    alone = generate(load(settings(llama_folder)).worker, dict(enumerate(kinds)))
    assert tokens_of(one) == tokens_of(alone)
    made = [worker.ranks.calls for worker in ranks.workers if worker.ranks]
    assert made[0] == made[1]
