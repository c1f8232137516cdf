"""What LoRA adapters cost a step that only generates: `adapters MODEL [NAME=FOLDER ...]`, one step each way in turn."""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.checkpoints.adapters import draw_adapters
from benchmarks.kernels.step import decode_plans
from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from tessera.decoder.v1.decoder_pb2 import StepResult


def main(arguments: list[str]) -> None:
    """Prints lower quartile and median in milliseconds, the quartile's ratio to that without adapters, and by how much
    each adapter in the batch makes it longer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("modules", nargs="*", help="NAME=FOLDER; drawn ones unless given")
    parser.add_argument("--adapters", type=int, default=4, help="how many are drawn")
    parser.add_argument("--rank", type=int, default=16, help="of those")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=300)
    told = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        given = told.modules
        if not given:
            given = draw_adapters(told.model, Path(folder), told.adapters, told.rank)
        _run(told, given)


def _run(told: argparse.Namespace, modules: Sequence[str]) -> None:
    settings = DecoderSettings(
        model=told.model,
        dtype=told.dtype,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=2048,
        lora_modules=",".join(modules),
    )
    worker = load(settings).worker
    print(f"{'rows':>4}  {'adapters':<10}{'quartile':>10}{'median':>10}{'ratio':>8}{'each':>10}")
    for rows in told.rows:
        times = _measure(worker, rows, len(modules), told.steps)
        without = statistics.quantiles(times[0], n=4)[0]
        for adapters, taken in times.items():
            low, middle, _ = statistics.quantiles(taken, n=4)
            each = 100 * (low / without - 1) / adapters if adapters else 0
            shown = f"{1000 * low:10.2f}{1000 * middle:10.2f}{low / without:8.3f}{each:8.1f} %"
            print(f"{rows:>4}  {adapters:<10}{shown}")


def _measure(worker: Worker, rows: int, most: int, steps: int) -> dict[int, list[float]]:
    """Seconds of steps by how many adapters the rows have between them, every row one; with 0 none has."""
    ways = range(min(most, rows) + 1)
    times: dict[int, list[float]] = {way: [] for way in ways}
    results: list[StepResult] = []
    plans = decode_plans(rows, 1 + steps // len(ways) * len(ways), worker.limits.block_size)
    for number, plan in enumerate(plans, 1):
        plan.step = number
        way = number % len(ways)
        if number > rows:
            worker.slots.adapter[:rows] = [1 + row % way if way else 0 for row in range(rows)]
        began = time.perf_counter()
        worker.step(read_plan(plan, worker.limits), results.append)
        if number > rows + 1:
            times[way].append(time.perf_counter() - began)
    assert not any(result.failed for result in results)
    worker.reset()
    return times
