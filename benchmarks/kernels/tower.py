"""What encoding one picture costs: the tower on our kernels against the same tower by torch, in turns.

`make bench ARGS='tower /tmp/llava-0.5b'`, a folder from `python -m benchmarks.checkpoints`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from services.families.family import ItemSize
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.devices.cpu.ops import KernelOps
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import Encoder, Item, pixel_item
from shared.checkpoint.folder import Checkpoint

_SIDE = 336


def main(arguments: list[str]) -> int:
    """Prints both times and their ratio; returns 1 where there are no kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--wall", action="store_true", help="time by the clock, not of the processor"
    )
    options = parser.parse_args(arguments)
    clock = time.perf_counter if options.wall else time.process_time
    dtype = getattr(torch, options.dtype)
    on_kernels = CpuDevice(dtype, options.threads)
    ours = load_encoder(Checkpoint(options.model), on_kernels)
    theirs = load_encoder(Checkpoint(options.model), _ByTorch(dtype, options.threads))
    known = isinstance(on_kernels.ops, KernelOps)
    if ours is None or theirs is None or not (ours.uses_ops and known):
        print("there are no kernels for this machine, or this model has no tower of ours")
        return 1
    item = picture(ours)
    torch.set_num_threads(options.threads)
    ours.encode([item])
    theirs.encode([item])
    times = [
        (measure(clock, ours, item), measure(clock, theirs, item)) for _ in range(options.repeats)
    ]
    mine, other = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    print(
        f"{options.dtype}, {options.threads} threads, {ours.cost(item)} patches:"
        f" kernels {mine:.0f} ms, torch {other:.0f} ms, ratio {ratio:.2f}"
    )
    return 0


class _ByTorch(CpuDevice):
    """The CPU without our kernels."""

    def _make_ops(self) -> TowerOps:
        return TowerOps(self.where, self.dtype)


def picture(model: Encoder) -> Item:
    """A picture of 336x336 pixels, or of the only size that the tower takes."""
    item = model.sample(ItemSize(_SIDE, _SIDE))
    values = np.random.default_rng(0).normal(size=item.pixels.shape).astype(np.float32)
    return pixel_item(values, item.grid, item.height, item.width)


def measure(clock: Callable[[], float], model: Encoder, item: Item) -> float:
    """Seconds of one call."""
    began = clock()
    model.encode([item])
    return clock() - began
