"""The towers of Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025) on the kernels."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from services.vision_encoder.devices.cpu import ACTIVATIONS, Rotation, TowerOps
from services.vision_encoder.towers.blocks import Block, run_blocks
from services.vision_encoder.towers.llava_tower import norm_of
from shared.cpu_kernels import binding

Grid = tuple[int, int, int]

_KNOWN_GRIDS = 16


class QwenTower:
    """Packed patches to merged rows. Takes the weights away from the network it is made of."""

    def __init__(self, tower: Any, ops: TowerOps) -> None:
        config = tower.config
        self._ops = ops
        self._heads = int(config.num_heads)
        self._merge = int(config.spatial_merge_size)
        self._rotary = tower.rotary_pos_emb
        self._patches = ops.pack(tower.patch_embed.proj)
        windowed = hasattr(tower, "fullatt_block_indexes")
        self._window = (int(config.window_size), int(config.patch_size)) if windowed else None
        everywhere = range(len(tower.blocks))
        self._sees_all = set(tower.fullatt_block_indexes if windowed else everywhere)
        self._blocks = [_block(ops, layer, config.hidden_act) for layer in tower.blocks]
        self._norm = norm_of(tower.merger.ln_q)
        self._up = ops.pack(tower.merger.mlp[0], epilogue=binding.GELU)
        self._down = ops.pack(tower.merger.mlp[2])
        self._plan = lru_cache(_KNOWN_GRIDS)(self._make_plan)

    @staticmethod
    def knows(config: Any) -> bool:
        """Whether the kernels have the activation that the checkpoint asks for."""
        gated = hasattr(config, "fullatt_block_indexes")
        return config.hidden_act == "silu" if gated else config.hidden_act in ACTIVATIONS

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[patches, values] of items one after the other to [patches / merge^2, hidden size]."""
        plans = [self._plan(grid) for grid in grids]
        starts = _starts([len(plan.order) for plan in plans])
        order = torch.cat([plan.order + start for plan, start in zip(plans, starts, strict=True)])
        rotation = Rotation(
            torch.cat([plan.cos for plan in plans]), torch.cat([plan.sin for plan in plans])
        )
        unit = self._merge**2
        x = self._ops.linear(patches, self._patches)
        if self._window:
            x = x.view(len(order), -1)[order].view(len(order) * unit, -1)
        size = x.shape[1] // self._heads
        steps, windows = (
            self._ops.segments(lengths, self._heads, size) if lengths else None
            for lengths in (
                [length for plan in plans for length in plan.steps],
                [length for plan in plans for length in plan.windows],
            )
        )
        segments = [
            steps if number in self._sees_all else windows for number in range(len(self._blocks))
        ]
        states = run_blocks(self._ops, self._blocks, x, self._heads, segments, rotation)  # type: ignore[arg-type]
        rows = self._ops.add_norm(None, states[len(self._blocks)], self._norm)
        rows = self._ops.linear(rows.view(len(order), -1), self._up)
        rows = self._ops.linear(rows, self._down)
        return rows[torch.argsort(order)] if self._window else rows

    def _make_plan(self, grid: Grid) -> "_Plan":
        grids = torch.tensor([grid])
        unit = self._merge**2
        tokens = grid[0] * grid[1] * grid[2]
        places = get_vision_position_ids(grids, self._merge)
        cos, sin = self._rotary(places, places)
        order, windows = torch.arange(tokens // unit), []
        if self._window:
            size, patch = self._window
            order, ends = get_vision_window_index(
                grids, spatial_merge_size=self._merge, window_size=size, patch_size=patch
            )
            windows = torch.diff(ends).tolist()
            cos, sin = (
                table.view(len(order), unit, -1)[order].view(tokens, -1) for table in (cos, sin)
            )
        half = sin.shape[1] // 2
        sin = torch.cat([-sin[:, :half], sin[:, half:]], dim=1)
        return _Plan(order, cos.contiguous(), sin, [grid[1] * grid[2]] * grid[0], windows)


class _Plan:
    """What follows from an item's grid alone: the order of its merged patches, their rotation, and
    the lengths of the stretches that see each other in all and in windowed layers."""

    def __init__(
        self, order: Tensor, cos: Tensor, sin: Tensor, steps: list[int], windows: list[int]
    ) -> None:
        self.order, self.cos, self.sin = order, cos, sin
        self.steps, self.windows = steps, windows


def _starts(counts: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts


def _block(ops: TowerOps, layer: Any, activation: str) -> Block:
    mlp = layer.mlp
    if hasattr(mlp, "gate_proj"):
        up = ops.pack(mlp.gate_proj, mlp.up_proj, epilogue=binding.SWIGLU)
        down = ops.pack(mlp.down_proj)
    else:
        up = ops.pack(mlp.fc1, epilogue=ACTIVATIONS[activation])
        down = ops.pack(mlp.fc2)
    return Block(
        norm1=norm_of(layer.norm1),
        qkv=ops.pack(layer.attn.qkv),
        output=ops.pack(layer.attn.proj),
        norm2=norm_of(layer.norm2),
        up=up,
        down=down,
    )
