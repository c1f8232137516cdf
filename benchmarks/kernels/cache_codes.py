"""Attention of tokens to a cache in bfloat16 and to one of codes (--kv-cache-dtype int8), in turns: `cache_codes`."""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.steps.attention_meta import KVSpec

_HEADS = ((14, 2, 64), (28, 4, 128), (16, 16, 64))  # of queries, of keys, size
_KEYS = (1024, 4096, 16_384)
_ROWS = (1, 8)
_LEAST_BYTES, _MOST_BYTES = 96 << 20, 400 << 20  # of caches in bfloat16: more than a core's own


def main(arguments: list[str]) -> None:
    """Prints microseconds of one layer, lower quartiles, and the median of the ratios of turns.

    Of one thread it is the time that it computed, whatever else the machine does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    parser.add_argument("--threads", type=int, default=1)
    told = parser.parse_args(arguments)
    ops = CpuDevice(torch.bfloat16, threads=told.threads).ops
    assert isinstance(ops, CpuOps), "the CPU kernels are needed"
    print(f"{'':<44}{'bfloat16':>12}{'int8':>12}{'ratio':>8}  (us, {ops.arithmetic})")
    for heads in _HEADS:
        for keys in _KEYS:
            for rows in _ROWS:
                clock = time.thread_time if told.threads == 1 else time.perf_counter
                ways = [_way(ops, heads, keys, rows, coded, clock) for coded in (False, True)]
                end = time.perf_counter() + told.seconds
                turns: list[list[float]] = []
                while time.perf_counter() < end or len(turns) < 5:
                    turns.append([way() for way in ways])
                plain, codes = (
                    1e6 * statistics.quantiles(x, n=4)[0] for x in zip(*turns, strict=True)
                )
                ratio = statistics.median(a / b for a, b in turns)
                name = f"{rows} x {keys:,} keys, {heads[0]} / {heads[1]} of {heads[2]}"
                print(f"{name:<44}{plain:12.1f}{codes:12.1f}{ratio:8.2f}")


def _way(
    ops: CpuOps,
    heads: tuple[int, int, int],
    keys: int,
    rows: int,
    coded: bool,
    clock: Callable[[], float],
) -> Callable[[], float]:
    """A pass over the caches of some layers; gives the seconds for each."""
    num_q, num_kv, size = heads
    spec = KVSpec(num_kv, size, size, ops.dtype, coded=coded)
    blocks, numbers = rows * keys // ops.block_size, torch.Generator().manual_seed(0)
    of_one = blocks * 4 * num_kv * size * ops.block_size
    copies = max(1, min(24, _MOST_BYTES // of_one), -(-_LEAST_BYTES // of_one))
    table = torch.randperm(blocks, generator=numbers).int().view(rows, -1) + 1
    places = torch.arange(rows * keys)
    slots = table.flatten()[places // ops.block_size].long() * ops.block_size
    slots += places % ops.block_size
    k, v = (torch.randn(rows * keys, num_kv, size, generator=numbers).bfloat16() for _ in range(2))
    q = torch.randn(rows, num_q, size, generator=numbers).bfloat16()
    caches = [ops.alloc_kv(spec, blocks + 1) for _ in range(copies)]
    written = ops.make_meta([keys] * rows, [keys] * rows, table, slots)
    for cache in caches:
        ops.kv_write(k, v, cache, written)
    meta = ops.make_meta([1] * rows, [keys] * rows, table, slots[keys - 1 :: keys])

    def run() -> float:
        began = clock()
        for cache in caches:
            ops.paged_attention(q, k, v, cache, meta, scale=size**-0.5)
        return (clock() - began) / len(caches)

    return run
