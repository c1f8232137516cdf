"""A step of the decoder alone, with and without what makes it fast, one step each in turn: `step MODEL`."""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from services.decoder.devices.base.ops import BaseOps
from services.decoder.loading.load import load
from services.decoder.models.llama import Llama
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import NewSequence, StepPlan, StepResult

_PROMPT = 200


def main(arguments: list[str]) -> None:
    """Prints lower quartile and median in milliseconds, and the quartile's ratio to that of the first way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=300)
    told = parser.parse_args(arguments)
    settings = DecoderSettings(
        model=told.model, dtype=told.dtype, kv_cache_memory_bytes=256 << 20, max_model_len=2048
    )
    worker = load(settings).worker
    print(f"{'rows':>4}  {'way':<22}{'quartile':>10}{'median':>10}{'ratio':>8}   (ms)")
    for rows in told.rows:
        times = _measure(worker, rows, told.steps)
        slowest = statistics.quantiles(times["neither"], n=4)[0]
        for way, taken in times.items():
            low, middle, _ = statistics.quantiles(taken, n=4)
            ratio = low / slowest
            print(f"{rows:>4}  {way:<22}{1000 * low:10.2f}{1000 * middle:10.2f}{ratio:8.3f}")


def _ways(model: Llama) -> dict[str, Callable[[], None]]:
    ops, head = model._ops, model._head
    whole = dataclasses.replace(head, sketch=None)  # type: ignore[call-arg]  # of the CPU's ops

    def choose(fused: bool, sketched: bool) -> None:
        model._head = head if sketched else whole
        vars(ops).pop("decoder_layer", None)
        if not fused:
            vars(ops)["decoder_layer"] = lambda *given: BaseOps.decoder_layer(ops, *given)

    return {
        "neither": lambda: choose(False, False),
        "layers in one call": lambda: choose(True, False),
        "head by a sketch": lambda: choose(False, True),
        "both": lambda: choose(True, True),
    }


def _measure(worker: Worker, rows: int, steps: int) -> dict[str, list[float]]:
    assert isinstance(worker._model, Llama)
    ways = _ways(worker._model)
    times: dict[str, list[float]] = {way: [] for way in ways}
    results: list[StepResult] = []
    plans = decode_plans(rows, 1 + steps // len(ways) * len(ways), worker.limits.block_size)
    for number, plan in enumerate(plans, 1):
        plan.step = number
        way = list(ways)[number % len(ways)]
        ways[way]()
        began = time.perf_counter()
        worker.step(read_plan(plan, worker.limits), results.append)
        if number > rows + 1:
            times[way].append(time.perf_counter() - began)
    ways["both"]()
    assert not any(result.failed for result in results)
    worker.reset()
    return {way: taken[: steps // len(ways)] for way, taken in times.items()}


def decode_plans(rows: int, steps: int, block_size: int) -> list[StepPlan]:
    """One prompt after the other, then a token of each in every step."""
    blocks = -(-(_PROMPT + steps) // block_size)
    greedy = SamplingParams(repetition_penalty=1, top_p=1, max_tokens=steps + 1)
    plans = []
    for slot in range(rows):
        tokens = _ints(*[(7 * i + slot) % 200 + 2 for i in range(_PROMPT)])
        first = 1 + slot * blocks
        plans.append(
            StepPlan(
                new=[
                    NewSequence(slot=slot, prompt_len=_PROMPT, tokens=tokens, sampling=greedy)
                ],
                edit_slot=_ints(slot), edit_index=_ints(0), edit_len=_ints(blocks),
                edit_blocks=_ints(*range(first, first + blocks)),
                row_slot=_ints(slot), row_start=_ints(0), row_count=_ints(_PROMPT),
                sample_row=_ints(0), sample_slot=_ints(slot),
            )
        )  # fmt: skip
    slots = _ints(*range(rows))
    for step in range(steps):
        plans.append(
            StepPlan(
                row_slot=slots, row_start=_ints(*[_PROMPT + step] * rows),
                row_count=_ints(*[1] * rows), sample_row=slots, sample_slot=slots,
            )
        )  # fmt: skip
    return plans


def _ints(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()
