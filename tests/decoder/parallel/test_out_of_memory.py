"""Memory that does not suffice on one of several ranks: all do the same about it, and none waits for good."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from services.decoder.loading.load import load_rank
from services.decoder.parallel.place import Place
from services.decoder.settings import DecoderSettings
from services.decoder.worker.worker import Worker
from tests.support.decoder.prompts_step import LARGEST, SLOTS, run_next, run_prompts
from tests.support.decoder.step_stream import read_ints
from tests.support.decoder.thread_ranks import Meeting, ThreadRanks

T = TypeVar("T")

OTHERS = [slot for slot in SLOTS if slot != LARGEST]


class Ranks:
    """Two workers, each on a thread of its own."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        chosen = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
        settings = DecoderSettings.model_validate({**chosen, "threads": 1})
        self._pool = pool
        self._meeting = Meeting(2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "services.decoder.loading.load.connect",
                lambda share, backend, meeting: ThreadRanks(share, self._meeting),
            )
            places = [Place(settings, rank, 2, folder / "meeting") for rank in range(2)]
            self.workers = [loaded.worker for loaded in pool.map(load_rank, places)]

    def both(self, work: Callable[[Worker], T]) -> Sequence[T]:
        """What it gives on each rank."""

        def run(worker: Worker) -> T:
            try:
                return work(worker)
            except BaseException:
                self._meeting.barrier.abort()
                raise

        return list(self._pool.map(run, self.workers))


@pytest.fixture
def ranks(llama_folder: Path) -> Iterator[Ranks]:
    with ThreadPoolExecutor(2) as pool:
        yield Ranks(llama_folder, pool)


def fail(worker: Worker, monkeypatch: pytest.MonkeyPatch, where: str, times: int) -> None:
    """One rank finds no memory so many times: before a layer, or where samples are computed or sent."""
    owners = {"largest": worker._model, "download": worker._device}
    name = where if where in owners else "decoder_layer"
    owner = owners.get(where, worker._device.ops)
    inner, embed = getattr(owner, name), worker._model.embed
    layers, failures = 0, 0

    def begin(*given: Any) -> torch.Tensor:
        nonlocal layers
        layers = 0
        return embed(*given)

    def call(*given: Any, **named: Any) -> Any:
        nonlocal layers, failures
        layers += 1
        if failures < times and where in (name, f"layer {layers}"):
            failures += 1
            raise torch.OutOfMemoryError("there is none left")
        return inner(*given, **named)

    monkeypatch.setattr(worker._model, "embed", begin)
    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("where", ["layer 1", "layer 2", "largest", "download"])
def test_all_ranks_try_a_step_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = ranks.both(run_prompts)
    freed: list[int] = []
    for rank, worker in enumerate(ranks.workers):
        monkeypatch.setattr(worker._device, "free_unused", lambda rank=rank: freed.append(rank))
    fail(ranks.workers[1], monkeypatch, where, times=1)
    again = ranks.both(run_prompts)
    assert sorted(freed) == [0, 1]
    for result in again:
        assert result.tokens == expected[0].tokens and not result.failed


@pytest.mark.parametrize("rank", [0, 1])
def test_the_largest_prompt_fails_on_all_ranks(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    tokens = read_ints(ranks.both(run_prompts)[0].tokens)
    expected_next = ranks.both(lambda worker: run_next(worker, OTHERS))[0].tokens
    fail(ranks.workers[rank], monkeypatch, "layer 2", times=2)
    tokens[LARGEST] = -1
    for result in ranks.both(run_prompts):
        assert read_ints(result.tokens) == tokens
        [failed] = result.failed
        assert failed.row == LARGEST and failed.failure.reason == "OUT_OF_MEMORY"
    for result in ranks.both(lambda worker: run_next(worker, OTHERS)):
        assert result.tokens == expected_next


def test_a_step_without_prompts_that_finds_no_memory_is_an_error_of_its_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.both(run_prompts)
    fail(ranks.workers[0], monkeypatch, "layer 1", times=1)
    with pytest.raises(torch.OutOfMemoryError):
        ranks.both(lambda worker: run_next(worker, SLOTS))
