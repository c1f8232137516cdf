"""A step of the decoder beside the time that reading its weights and keys takes at the memory's bandwidth, which is
measured in turn with the steps: `bound MODEL`.

Where a step is longer than its bound the parts say where the rest is: decoder layers, choice of the largest logit,
and what lies between (Python, inputs, embedding, sampling).
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.step import decode_plans
from services.decoder.loading.load import load
from services.decoder.models.llama import Llama
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from shared.cpu_kernels.host_memory import zeros_in_huge_pages
from shared.hardware import processors
from tessera.decoder.v1.decoder_pb2 import StepResult

_READ = 512 << 20  # bytes of one reading: more than any cache holds
_STEPS_EACH = 10  # between two readings


def main(arguments: list[str]) -> None:
    """Prints lower quartiles: GB/s of the memory, milliseconds of bound, step and parts, and GB/s of each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=300)
    told = parser.parse_args(arguments)
    settings = DecoderSettings(
        model=told.model,
        dtype=told.dtype,
        quantization=told.quantization,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=2048,
    )
    worker = load(settings).worker
    read = _reader()
    for rows in told.rows:
        _print(rows, _Parts(worker), read, told.steps)


def _reader() -> Callable[[], float]:
    """Reads memory once by torch's sum in all threads; bytes a second."""
    memory = zeros_in_huge_pages((_READ // 4,), torch.float32, touch=True).fill_(1)

    def read() -> float:
        own = torch.get_num_threads()  # a decoder with threads of its own leaves torch one
        torch.set_num_threads(processors.threads())
        began = time.perf_counter()
        memory.sum()
        seconds = time.perf_counter() - began
        torch.set_num_threads(own)
        return _READ / seconds

    return read


class _Parts:
    """A decoder whose layers and head are timed: seconds of each in every step, and the bytes that they read."""

    def __init__(self, worker: Worker) -> None:
        model = worker._model
        assert isinstance(model, Llama)
        self.worker, self._model = worker, model
        self.seconds: dict[str, float] = defaultdict(float)
        ops, packed = model._ops, model._layers
        for name, method in (("layers", "decoder_layer"), ("head", "largest")):
            vars(ops)[method] = self._timed(name, getattr(type(ops), method).__get__(ops))
        linears = [
            p for layer in packed for p in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        self._weights = sum(_bytes(linear) for linear in linears)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            result = call(*given)
            self.seconds[name] += time.perf_counter() - began
            return result

        return timed

    def bytes_read(self, rows: int, context: int) -> dict[str, int]:
        """Of a step in which so many rows have so much context each."""
        head: Any = self._model._head
        sketched = head.sketch is not None and rows <= self._model._ops.sketched_rows(head)
        cache = sum(getattr(spec, "bytes_per_token", 0) for spec in self._model.layers)
        return {
            "layers": self._weights + rows * context * cache,
            "head": head.sketch.num_bytes if sketched else _bytes(head),
        }


def _bytes(packed: Any) -> int:
    return int(packed.layer.num_bytes)


def _print(rows: int, parts: _Parts, read: Callable[[], float], steps: int) -> None:
    worker, results = parts.worker, list[StepResult]()
    taken: dict[str, list[float]] = defaultdict(list)
    bandwidths: list[float] = []
    plans = decode_plans(rows, steps, worker.limits.block_size)
    prompts = len(plans) - steps
    for number, plan in enumerate(plans, 1):
        plan.step = number
        if number % _STEPS_EACH == 0:
            bandwidths.append(read())
        parts.seconds.clear()
        began = time.perf_counter()
        worker.step(read_plan(plan, worker.limits), results.append)
        whole = time.perf_counter() - began
        if number > prompts + 1:
            for name, seconds in parts.seconds.items():
                taken[name].append(seconds)
            taken["rest"].append(whole - sum(parts.seconds.values()))
            taken["step"].append(whole)
    assert not any(result.failed for result in results)
    worker.reset()
    bandwidth = statistics.quantiles(bandwidths, n=4)[2]
    read_bytes = parts.bytes_read(rows, 200 + steps // 2)
    bound = sum(read_bytes.values()) / bandwidth
    step = statistics.quantiles(taken["step"], n=4)[0]
    print(
        f"{rows} rows: memory {bandwidth / 1e9:.1f} GB/s, {sum(read_bytes.values()) / 1e6:.0f} MB a step"
    )
    print(
        f"  bound {1000 * bound:.2f} ms, step {1000 * step:.2f} ms, {step / bound:.2f} of the bound"
    )
    for name in ("layers", "head", "rest"):
        low = statistics.quantiles(taken[name], n=4)[0]
        rate = f", {read_bytes[name] / low / 1e9:.1f} GB/s" if name in read_bytes else ""
        print(f"  {name:<6} {1000 * low:7.2f} ms{rate}")
