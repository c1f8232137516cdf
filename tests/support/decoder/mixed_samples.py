"""Sequences that are chosen differently in one step, by a worker on any device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from tessera.decoder.v1.decoder_pb2 import StepResult
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints

Kind = Mapping[str, Any]  # settings of the sampler that are not those of `greedy`

STEPS, BLOCKS = 12, 4
PROMPTS = [np.random.default_rng(n).integers(0, 400, 9 + 3 * n).tolist() for n in range(4)]
PENALTY: Kind = {"presence_penalty": 1.5, "repetition_penalty": 1.3}
ALLOWED = list(range(0, 400, 3))
MASK: Kind = {"allowed_token_ids": ALLOWED}
KINDS: list[list[Kind]] = [
    [{}, PENALTY, {}, {}],
    [{}, MASK, {"no_repeat_ngram_size": 1}, {}],
    [{}, {"temperature": 0.8, "top_k": 20}, PENALTY, {"logprobs": 2}],
]


def settings(folder: Path, device: str = "cpu") -> DecoderSettings:
    """Of a decoder in float32."""
    chosen = {"model": folder, "device": device, "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    return DecoderSettings.model_validate({**chosen, "dtype": "float32"})


def generate(worker: Worker, kinds: Mapping[int, Kind]) -> list[StepResult]:
    """Results of steps in turn, of a sequence in each of these slots."""
    slots, results = list(kinds), list[StepResult]()
    order = list(range(len(slots)))
    for step in range(STEPS):
        lengths = [len(PROMPTS[slot]) for slot in slots]
        plan = make_plan(
            step=step + 1,
            row_slot=slots,
            row_start=[length + step - 1 for length in lengths] if step else [0] * len(slots),
            row_count=[1] * len(slots) if step else lengths,
            sample_row=order,
            sample_slot=slots,
        )
        if step == 0:
            opening = make_plan(
                new=[introduce(Text(s, PROMPTS[s], greedy(seed=s, **kinds[s]))) for s in slots],
                edit_slot=slots,
                edit_index=[0] * len(slots),
                edit_len=[BLOCKS] * len(slots),
                edit_blocks=[1 + BLOCKS * slot + n for slot in slots for n in range(BLOCKS)],
            )
            plan.MergeFrom(opening)
        worker.step(read_plan(plan, worker.limits), results.append)
    worker.reset()
    return results


def tokens_of(results: list[StepResult]) -> list[list[int]]:
    """By step those of each sample."""
    assert not any(result.failed for result in results)
    return [read_ints(result.tokens) for result in results]


def require_each_as_alone(worker: Worker, kinds: list[Kind]) -> None:
    """What each gets does not depend on what the others ask for, and what is masked never comes."""
    together = tokens_of(generate(worker, dict(enumerate(kinds))))
    for slot, kind in enumerate(kinds):
        alone = [token for [token] in tokens_of(generate(worker, {slot: kind}))]
        assert [step[slot] for step in together] == alone
        if kind is MASK:
            free = [token for [token] in tokens_of(generate(worker, {slot: {}}))]
            assert set(alone) <= set(ALLOWED) and not set(free) <= set(ALLOWED)
