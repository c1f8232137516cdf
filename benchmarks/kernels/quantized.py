"""Linear layers over codes beside the same ones in bfloat16: `quantized`.

All take turns within one run; the time that rows take to become whole numbers is part of it. Types of GGUF files are
schemes too; those of whole blocks of 256 inputs fit the larger shapes alone.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shared.checkpoint.gguf.block_types import CODED
from shared.cpu_kernels import binding, packed_linear, quantized_linear
from shared.cpu_kernels.packed_linear import PackedLinear
from shared.hardware import processors
from shared.weights.linear_weight import in_memory
from shared.weights.on_the_fly import quantize
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.gguf import is_exact, read_blocks
from shared.weights.scheme import HEAD, SCHEMES, Scheme

# Outputs and inputs: gate and up (without their product), down, and queries, keys and values, of `text-0.5b` and of a
# model with 7 billion parameters.
_SHAPES = {
    "0.4b": ((9728, 896), (896, 4864), (1152, 896)),
    "7b": ((37888, 3584), (3584, 18944), (4608, 3584)),
}
_LEAST_BYTES = 100 << 20  # of each way's weights: more than any cache holds
_TOKENS_FROM = 64  # rows at which weights may stay in caches
# Beside what --quantization has: groups of int8 with 8 bits of activations for whole rows, and int4 with as many.
_SCHEMES = {**SCHEMES, "int8-row": Scheme(8, 0, 1), "int4-fast": Scheme(4, 128, 1)}
_DEFAULT = ("int8", "int8-fast", "int4g64", "int4g128", "int4-fast")

Run = Callable[[], float]  # one pass; seconds for each layer


def main(arguments: list[str]) -> None:
    """Prints for each scheme how many times as fast as bfloat16 it is: all layers of a shape together, medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 256])
    parser.add_argument("--shapes", nargs="+", choices=_SHAPES, default=list(_SHAPES))
    parser.add_argument(
        "--schemes", nargs="+", choices=[*_SCHEMES, *filter(is_exact, CODED)], default=_DEFAULT
    )
    parser.add_argument("--threads", type=int, default=processors.threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--own-time", action="store_true", help="of one thread's processor, where others run"
    )
    told = parser.parse_args(arguments)
    clock = time.thread_time if told.own_time else time.perf_counter
    kernels = binding.load_kernels(1 if told.own_time else told.threads)
    if kernels is None:
        raise SystemExit("there are no CPU kernels here")
    print(f"{kernels.name}, {kernels.threads} threads, {processors.find()}")
    print(
        f"{'shapes':>6} {'rows':>5}  {'bf16 ms':>8}"
        + "".join(f"{name:>11}" for name in told.schemes)
    )
    for shapes in told.shapes:
        ways = _pack(kernels, _SHAPES[shapes], told.schemes)
        for rows in told.rows:
            total = dict.fromkeys(("bfloat16", *told.schemes), 0.0)
            for shape, layers in ways.items():
                x = torch.randn(rows, shape[1]).bfloat16()
                out = torch.empty((rows, shape[0]), dtype=torch.bfloat16)
                runs: dict[str, Run] = {
                    name: partial(
                        _run, kernels, clock, x, some if rows < _TOKENS_FROM else some[:1], out
                    )
                    for name, some in layers.items()
                }
                for name, seconds in _in_turns(runs, told.rounds).items():
                    total[name] += seconds
            base = total.pop("bfloat16")
            ratios = "".join(f"{base / seconds:11.2f}" for seconds in total.values())
            print(f"{shapes:>6} {rows:>5}  {1e3 * base:8.2f}{ratios}", flush=True)


def _pack(
    kernels: binding.Kernels, shapes: tuple[tuple[int, int], ...], schemes: list[str]
) -> dict[tuple[int, int], dict[str, list[PackedLinear]]]:
    """Layers of each shape, by scheme: as many as fill the caches."""
    found = {}
    for shape in shapes:
        weight = torch.randn(shape) / 16
        dense = partial(packed_linear.pack, kernels, weight.bfloat16(), None)
        layers = {"bfloat16": _copies(dense)}
        for name in schemes:
            codes, digits = _codes(weight, name)
            pack = partial(quantized_linear.pack, kernels, codes, None, digits=digits)
            layers[name] = _copies(pack)
        found[shape] = layers
    return found


def _codes(weight: Tensor, name: str) -> tuple[QuantizedWeight, int]:
    """With the digits of activations. What codes of blocks are does not change the time."""
    if name not in CODED:
        return quantize(in_memory(weight), _SCHEMES[name]), _SCHEMES[name].digits
    block, (out, inputs) = CODED[name], weight.shape
    if inputs % block.elements:
        raise SystemExit(f"{inputs} inputs are no whole blocks of {name}")
    row = inputs // block.elements * block.nbytes
    return read_blocks(name, torch.zeros((out, row), dtype=torch.uint8)), HEAD.digits


def _copies(pack: Callable[[], PackedLinear]) -> list[PackedLinear]:
    first = pack()
    return [first, *(pack() for _ in range(_LEAST_BYTES // first.num_bytes))]


def _run(
    kernels: binding.Kernels,
    clock: Callable[[], float],
    x: Tensor,
    layers: list[PackedLinear],
    out: Tensor,
) -> float:
    began = clock()
    for layer in layers:
        packed_linear.linear(kernels, x, layer, out)
    return (clock() - began) / len(layers)


def _in_turns(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(run())
    return {name: statistics.median(times) for name, times in taken.items()}
