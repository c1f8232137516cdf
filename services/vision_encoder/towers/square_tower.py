"""A vision transformer over squares that are all of one size."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from services.vision_encoder.devices.base.ops import Norm, Packed, TowerOps
from services.vision_encoder.towers.blocks import Block, run_blocks


class SquareTower:
    """Patches of squares to the states of its layers."""

    def __init__(
        self,
        ops: TowerOps,
        patches: Packed,
        positions: Tensor,
        blocks: Sequence[Block],
        heads: int,
        class_row: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """positions: [rows, hidden], added to each square's rows. class_row: [hidden], stands before the patches of
        each square. norm: before the first layer."""
        self._ops, self._heads = ops, heads
        self._patches, self._blocks, self._norm = patches, blocks, norm
        self._first: Tensor | None = None
        if class_row is not None:
            self._first = (class_row + positions[0])[None]
            positions = positions[1:]
        self._positions = positions

    def __call__(self, patches: Tensor, keep: Collection[int] = ()) -> dict[int, Tensor]:
        """States [n, rows, hidden] of patches [n, patches, values]: the last one, and those that `keep` names, counted
        from 0, what enters the first layer."""
        x = self._embed(patches)
        count, rows, width = x.shape
        x = x.flatten(0, 1)
        if self._norm is not None:
            x = self._ops.norm(x, self._norm)
        segments = self._ops.segments([rows] * count, self._heads, width // self._heads)
        shared = [segments] * len(self._blocks)
        states = run_blocks(self._ops, self._blocks, x, self._heads, shared, keep=keep)
        return {number: state.view(count, rows, width) for number, state in states.items()}

    def _embed(self, patches: Tensor) -> Tensor:
        """Patches and what is known of their places [n, rows, hidden]."""
        count, places, _ = patches.shape
        x = self._ops.linear(patches.flatten(0, 1).contiguous(), self._patches)
        x = x.view(count, places, -1)
        x += self._positions
        if self._first is None:
            return x
        return torch.cat([self._first.expand(count, 1, -1), x], dim=1)
