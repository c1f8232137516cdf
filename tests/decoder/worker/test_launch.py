"""Steps that are launched before the one before them is collected: ids that only the device knows."""

from pathlib import Path

import numpy as np
import pytest

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plan import read_plan
from services.decoder.worker.worker import LaunchedStep, Worker
from tessera.decoder.v1.decoder_pb2 import StepResult
from tests.support.step_stream import Text, greedy, introduce, make_plan, read_ints

PROMPTS = [np.random.default_rng(n).integers(0, 400, 9 + 7 * n).tolist() for n in range(3)]
COUNT = 6


@pytest.fixture
def worker(llama_folder: Path) -> Worker:
    told = {"model": llama_folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    return load(DecoderSettings.model_validate(told)).worker


def launch(worker: Worker, step: int) -> LaunchedStep:
    """The prompts in the first step, then one token of each."""
    slots = list(range(len(PROMPTS)))
    lengths = [len(prompt) for prompt in PROMPTS]
    blocks = -(-(max(lengths) + COUNT) // worker.limits.block_size)
    plan = make_plan(
        step=step + 1,
        row_slot=slots,
        row_start=[length + step - 1 for length in lengths] if step else [0] * len(slots),
        row_count=[1] * len(slots) if step else lengths,
        sample_row=slots,
        sample_slot=slots,
    )
    if step == 0:
        texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(PROMPTS)]
        opening = make_plan(
            new=[introduce(text) for text in texts],
            edit_slot=slots,
            edit_index=[0] * len(slots),
            edit_len=[blocks] * len(slots),
            edit_blocks=list(range(1, 1 + blocks * len(slots))),
        )
        plan.MergeFrom(opening)
    return worker.launch(read_plan(plan, worker.limits))


def collect(worker: Worker, step: LaunchedStep) -> StepResult:
    results: list[StepResult] = []
    worker.collect(step, results.append)
    return results[0]


def test_a_step_may_be_launched_before_the_one_before_it_is_collected(worker: Worker) -> None:
    in_turn = [read_ints(collect(worker, launch(worker, n)).tokens) for n in range(COUNT)]
    worker.reset()
    ahead, launched = [], [launch(worker, 0)]
    for step in range(1, COUNT):
        launched.append(launch(worker, step))
        ahead.append(read_ints(collect(worker, launched.pop(0)).tokens))
    ahead.append(read_ints(collect(worker, launched.pop()).tokens))
    assert ahead == in_turn
    for slot, prompt in enumerate(PROMPTS):
        expected = [*prompt, *(tokens[slot] for tokens in in_turn)]
        assert worker.slots.tokens[slot, : worker.slots.length[slot]].tolist() == expected


def test_a_step_that_is_not_collected_has_changed_only_lengths(worker: Worker) -> None:
    """What an answer reports is decided when it is collected."""
    step = launch(worker, 0)
    lengths = [len(prompt) for prompt in PROMPTS]
    assert worker.slots.length[: len(PROMPTS)].tolist() == [length + 1 for length in lengths]
    assert worker.slots.computed[: len(PROMPTS)].tolist() == lengths
    result = collect(worker, step)
    assert not result.failed and len(read_ints(result.tokens)) == len(PROMPTS)
