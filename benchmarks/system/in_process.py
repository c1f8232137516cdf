"""The same model called in process: the decoder's own worker in a plain loop, without any service around it."""

import time
from pathlib import Path

import numpy as np

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import NewSequence, StepPlan, StepResult


def generate(model: Path, prompt: int, count: int, repeats: int) -> tuple[list[float], list[float]]:
    """Greedy generation of one sequence. Returns seconds to the first token, and between tokens, of every repeat."""
    loaded = load(DecoderSettings(model=model, kv_cache_memory_bytes=256 << 20))
    limits = loaded.worker.limits
    blocks = -(-(prompt + count) // limits.block_size)
    greedy = SamplingParams(repetition_penalty=1, top_p=1, max_tokens=count)
    tokens = _ints(*[(7 * i) % 200 + 2 for i in range(prompt)])
    first, between = [], []
    for _ in range(repeats):
        results: list[StepResult] = []
        stamps = [time.perf_counter()]
        for step in range(count):
            plan = StepPlan(step=step + 1)
            if step == 0:
                plan.new.append(
                    NewSequence(slot=0, prompt_len=prompt, tokens=tokens, sampling=greedy)
                )
                plan.edit_slot, plan.edit_index = _ints(0), _ints(0)
                plan.edit_len = _ints(blocks)
                plan.edit_blocks = _ints(*range(1, blocks + 1))
            start, rows = (0, prompt) if step == 0 else (prompt + step - 1, 1)
            plan.row_slot, plan.row_start, plan.row_count = _ints(0), _ints(start), _ints(rows)
            plan.sample_row, plan.sample_slot = _ints(0), _ints(0)
            loaded.worker.step(read_plan(plan, limits), results.append)
            stamps.append(time.perf_counter())
        assert not any(result.failed for result in results)
        loaded.worker.reset()
        gaps = np.diff(stamps).tolist()
        first.append(gaps[0])
        between += gaps[1:]
    return first, between


def _ints(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()
