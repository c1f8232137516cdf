"""A step of the decoder by our layers and by those of transformers, one step each in turn: `backends MODEL`."""

import argparse
import statistics
import time
from pathlib import Path

from benchmarks.kernels.step import decode_plans
from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from shared.model_backends import ModelBackend
from tessera.decoder.v1.decoder_pb2 import StepResult

_WAYS = (ModelBackend.NATIVE, ModelBackend.TRANSFORMERS)


def main(arguments: list[str]) -> None:
    """Prints lower quartile and median in milliseconds, and the quartile's ratio to that of our layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=100)
    told = parser.parse_args(arguments)
    workers = [_load(told.model, told.dtype, way) for way in _WAYS]
    print(f"{'rows':>4}  {'layers':<16}{'quartile':>10}{'median':>10}{'ratio':>8}   (ms)")
    for rows in told.rows:
        times = _measure(workers, rows, told.steps)
        least = statistics.quantiles(times[0], n=4)[0]
        for way, taken in zip(_WAYS, times, strict=True):
            low, middle, _ = statistics.quantiles(taken, n=4)
            print(f"{rows:>4}  {way:<16}{1000 * low:10.2f}{1000 * middle:10.2f}{low / least:8.3f}")


def _load(model: Path, dtype: str, way: ModelBackend) -> Worker:
    return load(
        DecoderSettings(
            model=model,
            dtype=dtype,
            kv_cache_memory_bytes=256 << 20,
            max_model_len=2048,
            model_backend=way,
        )
    ).worker


def _measure(workers: list[Worker], rows: int, steps: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in workers]
    results: list[StepResult] = []
    for number, plan in enumerate(decode_plans(rows, steps + 1, workers[0].limits.block_size), 1):
        plan.step = number
        for worker, taken in zip(workers, times, strict=True):
            read = read_plan(plan, worker.limits)
            began = time.perf_counter()
            worker.step(read, results.append)
            if number > rows + 1:
                taken.append(time.perf_counter() - began)
    assert not any(result.failed for result in results)
    for worker in workers:
        worker.reset()
    return times
