"""State that a layer keeps for each sequence beside the blocks: how much, and which of it belongs to a step's rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's state, as it is for one sequence: the last inputs of a convolution, say, or the sums of
    a recurrence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes for one sequence."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerState:
    """One layer's state in a step of n rows. A row never writes where any row reads: a step that is computed twice
    comes to the same."""

    tensors: Sequence[Tensor]  # one for each `StateTensor`: [places, *shape]
    read: Tensor  # int64 [n]: the place of each row's state before the step; 0, where zeros are, if it begins
    write: Tensor  # int64 [n]: the place for it after the step
