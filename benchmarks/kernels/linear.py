"""Linear layers by the kernels of every instruction set of this machine, beside torch in float32: `linear`.

All take turns within one run. To see torch as a machine without AVX-512 has it, start with
`ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shared.cpu_kernels import binding, choice, packed_linear
from shared.hardware import processors
from shared.settings import cpu_trial_folder

# Outputs and inputs: gate and up (without their product), down, and queries, keys and values of `text-0.5b`.
_SHAPES = ((4864, 896), (896, 4864), (1152, 896))
_LEAST_BYTES = 150 << 20  # of weights that few rows pass through: more than any cache holds

Run = Callable[[], float]  # one pass; seconds for each layer


def main(arguments: list[str]) -> None:
    """Prints GB/s of weights for one row, GFLOP/s for more: lower quartiles of the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 263])
    parser.add_argument("--threads", type=int, default=processors.threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each way and shape")
    told = parser.parse_args(arguments)
    torch.set_num_threads(told.threads)
    sets = choice.runnable_instruction_sets(cpu_trial_folder())
    all_kernels = {known.name: binding.open_kernels(known, told.threads) for known in sets}
    shapes = "".join(f"{f'{outputs}x{inputs}':>12}" for outputs, inputs in _SHAPES)
    print(f"{'rows':>4}  {'way':<24}{shapes}")
    for rows in told.rows:
        table: dict[str, list[float]] = {}
        for outputs, inputs in _SHAPES:
            ways = _ways(all_kernels, rows, outputs, inputs)
            for way, seconds in _in_turns(ways, told.seconds).items():
                size = outputs * inputs
                per_weight = (2 if "bfloat16" in way else 4) if rows == 1 else 2 * rows
                table.setdefault(way, []).append(per_weight * size / seconds / 1e9)
        for way, figures in table.items():
            unit = "GB/s" if rows == 1 else "GFLOP/s"
            print(f"{rows:>4}  {way:<24}{''.join(f'{figure:12.1f}' for figure in figures)}  {unit}")


def _ways(
    all_kernels: dict[str, binding.Kernels], rows: int, outputs: int, inputs: int
) -> dict[str, Run]:
    weight, x = torch.randn(outputs, inputs) / 16, torch.randn(rows, inputs)
    copies = max(1, _LEAST_BYTES // (4 * weight.numel())) if rows <= 64 else 1
    weights = [weight.clone() for _ in range(copies)]
    ways: dict[str, Run] = {"torch float32": lambda: _torch(x, weights)}
    for name, kernels in all_kernels.items():
        for dtype in (torch.float32, torch.bfloat16):
            more = copies * 4 // dtype.itemsize if copies > 1 else 1
            layers = [packed_linear.pack(kernels, weight.to(dtype), None) for _ in range(more)]
            given, out = x.to(dtype), torch.empty((rows, outputs), dtype=dtype)
            ways[f"{name} {str(dtype).removeprefix('torch.')}"] = partial(
                _ours, kernels, given, layers, out
            )
    return ways


def _torch(x: Tensor, weights: list[Tensor]) -> float:
    began = time.perf_counter()
    for weight in weights:
        torch.nn.functional.linear(x, weight)
    return (time.perf_counter() - began) / len(weights)


def _ours(
    kernels: binding.Kernels, x: Tensor, layers: list[packed_linear.PackedLinear], out: Tensor
) -> float:
    began = time.perf_counter()
    for layer in layers:
        packed_linear.linear(kernels, x, layer, out)
    return (time.perf_counter() - began) / len(layers)


def _in_turns(ways: dict[str, Run], seconds: float) -> dict[str, float]:
    taken: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + seconds * len(ways)
    while time.perf_counter() < end or len(taken[next(iter(ways))]) < 5:
        for way, run in ways.items():
            taken[way].append(run())
    return {way: statistics.quantiles(times, n=4)[0] for way, times in taken.items()}
