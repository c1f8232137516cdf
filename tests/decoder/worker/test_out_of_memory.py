"""A step for which the device's memory does not suffice costs the largest prompt, not the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.decoder.loading.load import Loaded
from services.decoder.settings import DecoderSettings
from services.decoder.worker.worker import Worker
from shared.errors import Overloaded
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.prompts_step import LARGEST, LENGTHS, SLOTS, run_next, run_prompts
from tests.support.decoder.step_stream import read_ints


@pytest.fixture(params=LOADS)
def worker(llama_folder: Path, request: pytest.FixtureRequest) -> Worker:
    chosen = {"model": llama_folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    loaded: Loaded = LOADS[request.param](DecoderSettings.model_validate({**chosen, "threads": 1}))
    return loaded.worker


def fail_forward(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]
) -> None:
    """Steps of so many tokens find no memory."""
    inner = worker._model.forward

    def forward(hidden: torch.Tensor, *given: Any) -> torch.Tensor:
        if fails(len(hidden)):
            raise torch.OutOfMemoryError("there is none left")
        return inner(hidden, *given)

    monkeypatch.setattr(worker._model, "forward", forward)


def test_a_step_is_tried_again_with_what_the_device_held_unused(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_prompts(worker)
    freed: list[bool] = []
    monkeypatch.setattr(worker._device, "free_unused", lambda: freed.append(True))
    fail_forward(worker, monkeypatch, lambda tokens: not freed)
    again = run_prompts(worker)
    assert freed == [True]
    assert again.tokens == expected.tokens and not again.failed


def test_the_largest_prompt_fails_and_the_others_go_on(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [slot for slot in SLOTS if slot != LARGEST]
    expected = read_ints(run_prompts(worker).tokens)
    expected_next = read_ints(run_next(worker, others).tokens)
    fail_forward(worker, monkeypatch, lambda tokens: tokens > LENGTHS[LARGEST])
    result = run_prompts(worker)
    expected[LARGEST] = -1
    assert read_ints(result.tokens) == expected
    [failed] = result.failed
    assert failed.row == LARGEST and failed.failure.reason == "OUT_OF_MEMORY"
    assert "--max-num-batched-tokens" in failed.failure.message
    assert read_ints(run_next(worker, others).tokens) == expected_next


def test_a_step_without_prompts_that_finds_no_memory_ends_the_stream(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_prompts(worker)
    fail_forward(worker, monkeypatch, lambda tokens: True)
    with pytest.raises(Overloaded, match="--max-num-seqs"):
        run_next(worker, SLOTS)
    monkeypatch.undo()
    assert not run_prompts(worker).failed
