"""Attention in bfloat16 by the kernels of every instruction set of this machine, in turns: `attention`."""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared.cpu_kernels import binding, choice

_TASK_ROWS = 96
_LEAST_BYTES = 96 << 20  # of caches that a token passes through: more than a core's own


@dataclass(frozen=True)
class _Shape:
    """`tokens` at the end of `keys`; `whole`: each sees all keys, as in a tower."""

    name: str
    tokens: int
    keys: int
    q_heads: int
    heads: int
    size: int
    whole: bool = False


_SHAPES = (
    _Shape("tower: 441 x 12 heads of 64", 441, 441, 12, 12, 64, whole=True),
    _Shape("tower: 576 x 16 heads of 72", 576, 576, 16, 16, 72, whole=True),
    _Shape("prompt: 263, 14 / 2 of 64", 263, 263, 14, 2, 64),
    _Shape("prompt: 256 after 1,024, 28 / 4 of 128", 256, 1280, 28, 4, 128),
    *(
        _Shape(f"token: after {keys - 1:,}, {2 * share} / 2 of 64", 1, keys, 2 * share, 2, 64)
        for keys in (300, 4000)
        for share in (1, 2, 4, 7)
    ),
)


def main(arguments: list[str]) -> None:
    """Prints lower quartiles, in microseconds of processor time of one layer, one thread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each set and shape")
    told = parser.parse_args(arguments)
    sets = choice.runnable_instruction_sets()
    all_kernels = {known.name: binding.open_kernels(known, 1) for known in sets}
    print(f"{'':<40}{''.join(f'{name:>14}' for name in all_kernels)}  (us)")
    for shape in _SHAPES:
        ways = [_way(kernels, shape) for kernels in all_kernels.values()]
        taken: list[list[float]] = [[] for _ in ways]
        end = time.perf_counter() + told.seconds * len(ways)
        while time.perf_counter() < end or len(taken[0]) < 5:
            for way, times in zip(ways, taken, strict=True):
                times.append(way())
        figures = (1e6 * statistics.quantiles(times, n=4)[0] for times in taken)
        print(f"{shape.name:<40}{''.join(f'{figure:14.1f}' for figure in figures)}")


def _way(kernels: binding.Kernels, shape: _Shape) -> Callable[[], float]:
    """One pass over every cache; gives the seconds for each."""
    padded = -(-shape.size // kernels.lanes) * kernels.lanes
    blocks = -(-shape.keys // kernels.page)
    block = (shape.heads, 1, 2, kernels.page * padded)
    size = 2 * blocks * shape.heads * 2 * kernels.page * padded
    copies = max(1, _LEAST_BYTES // size) if shape.tokens == 1 else 1
    generator = torch.Generator().manual_seed(0)
    memory = [torch.randn((blocks, *block), generator=generator).bfloat16() for _ in range(copies)]
    width = shape.q_heads * shape.size
    q = torch.randn((shape.tokens, width), generator=generator).bfloat16()
    out = torch.empty_like(q)
    table = torch.arange(blocks, dtype=torch.int32)
    each = max(1, _TASK_ROWS * shape.heads // shape.q_heads)
    before, seen = shape.keys - shape.tokens, shape.keys if shape.whole else 0
    tasks = torch.tensor(
        [
            (0, first, min(each, shape.tokens - first), before + first, seen)
            for first in range(0, shape.tokens, each)
        ],
        dtype=torch.int32,
    )
    caches = [binding.Cache(each.data_ptr(), 1, shape.heads, padded, shape.size) for each in memory]
    call = binding.Attention(
        q.data_ptr(), out.data_ptr(), width, width, table.data_ptr(), blocks, tasks.data_ptr(), len(tasks),
        shape.q_heads, shape.size**-0.5, 0.0, 0, None,
    )  # fmt: skip
    kept = (memory, q, out, table, tasks)

    def run() -> float:
        assert kept
        began = time.process_time()
        for cache in caches:
            kernels.attention(1, ctypes.byref(call), ctypes.byref(cache))
        return (time.process_time() - began) / len(caches)

    return run
