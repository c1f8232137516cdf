"""Steps of one token a row, captured once for some numbers of rows, and replayed: one call of the device's in place of
one for each operation."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.steps.step import Step

# Hidden rows [T, H] of a step, by the operations that are captured.
Forward = Callable[[Step], Tensor]

_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))


class Graphs(ABC):
    """One graph for each of `sizes`, numbers of rows in ascending order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def size_for(self, rows: int) -> int | None:
        """The smallest of the sizes that holds so many rows; None where there are too many."""
        place = bisect_left(self.sizes, rows)
        return self.sizes[place] if place < len(self.sizes) else None

    def longest(self, size: int) -> int | None:
        """Tokens of the longest sequences that a graph of this size is for: where there are longer ones `run` computes
        without. None where it is for all."""
        return None

    @abstractmethod
    def capture(self) -> None:
        """Captures all sizes; computes nothing. Raises whatever the device's libraries raise."""

    @abstractmethod
    def run(self, step: Step) -> Tensor:
        """Hidden rows [T, H] of a step whose T rows, one of the sizes, have one token each. They are overwritten by the
        next one."""


def graph_sizes(most: int) -> list[int]:
    """The sizes for steps of up to `most` rows: close enough to each other that few rows are computed for nothing. Of
    more than 256 rows none: their products take the time, and not the calls."""
    most = min(most, _SIZES[-1])
    return [*(size for size in _SIZES if size < most), most]


def blank_step(ops: BaseOps, rows: int, axes: int, width: int) -> Step:
    """A step of sequences of one token each that nobody asked for. They write to the first block of the cache, as those
    that a batch is filled up with, and see its first place alone. axes: of rotary positions; width: blocks in a row of
    the table. Operators of Ascend take no place twice: where one block is not enough for all rows but two are, as with
    those of an NPU, every row has a place of its own. Nothing is in the second block before graphs are captured."""
    device = ops.device
    table = torch.zeros((rows, width), dtype=torch.int32, device=device)
    places = torch.arange(rows, dtype=torch.int64, device=device)
    if rows > 2 * ops.block_size:
        places %= ops.block_size
    return Step(
        ids=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=torch.zeros((axes, rows), dtype=torch.int64, device=device),
        meta=ops.make_meta([1] * rows, [1] * rows, table, places),
        slots=range(rows),
    )
