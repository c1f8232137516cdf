"""A step for which the device's memory does not suffice costs the largest prompt, not the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.decoder.loading.load import Loaded
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plan import read_plan
from services.decoder.worker.worker import Worker
from shared.errors import Overloaded
from tessera.decoder.v1.decoder_pb2 import StepResult
from tests.support.decoder.deferred_device import LOADS
from tests.support.step_stream import Text, greedy, introduce, make_plan, read_ints

PROMPTS = [[5, 6, 7], list(range(100, 140)), [9, 8, 7, 6]]
SLOTS = list(range(len(PROMPTS)))
LENGTHS = [len(prompt) for prompt in PROMPTS]
LARGEST = 1
BLOCKS = 3  # of each sequence


@pytest.fixture(params=LOADS)
def worker(llama_folder: Path, request: pytest.FixtureRequest) -> Worker:
    chosen = {"model": llama_folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    loaded: Loaded = LOADS[request.param](DecoderSettings.model_validate({**chosen, "threads": 1}))
    return loaded.worker


def run_prompts(worker: Worker) -> StepResult:
    worker.reset()
    plan = make_plan(
        step=1,
        new=[introduce(Text(slot, PROMPTS[slot], greedy())) for slot in SLOTS],
        edit_slot=SLOTS,
        edit_index=[0] * len(SLOTS),
        edit_len=[BLOCKS] * len(SLOTS),
        edit_blocks=list(range(1, 1 + BLOCKS * len(SLOTS))),
        row_slot=SLOTS,
        row_start=[0] * len(SLOTS),
        row_count=LENGTHS,
        sample_row=SLOTS,
        sample_slot=SLOTS,
    )
    return run(worker, plan)


def run_next(worker: Worker, slots: list[int]) -> StepResult:
    """One token of some of the sequences."""
    rows = list(range(len(slots)))
    plan = make_plan(
        step=2,
        row_slot=slots,
        row_start=[LENGTHS[slot] for slot in slots],
        row_count=[1] * len(slots),
        sample_row=rows,
        sample_slot=slots,
    )
    return run(worker, plan)


def run(worker: Worker, plan: Any) -> StepResult:
    results: list[StepResult] = []
    worker.step(read_plan(plan, worker.limits), results.append)
    return results[0]


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
