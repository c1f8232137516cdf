"""The towers of Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.devices.base.ops import Rotation, TowerOps
from services.vision_encoder.towers.blocks import Block, norm_of, run_blocks

Grid = tuple[int, int, int]

_KNOWN_GRIDS = 16


class QwenTower:
    """Packed patches to merged rows. Takes the weights away from the module it is made of."""

    def __init__(self, tower: Any, device: Device) -> None:
        """tower: transformers' class, with the checkpoint's weights; its rotary frequencies are on the host."""
        config, ops = tower.config, device.ops
        self._device, self._ops = device, ops
        self._heads = int(config.num_heads)
        self._merge = int(config.spatial_merge_size)
        self._rotary = tower.rotary_pos_emb
        self._patches = ops.pack(tower.patch_embed.proj)
        windowed = hasattr(tower, "fullatt_block_indexes")
        self._window = (int(config.window_size), int(config.patch_size)) if windowed else None
        everywhere = range(len(tower.blocks))
        self._sees_all = set(tower.fullatt_block_indexes if windowed else everywhere)
        self._blocks = [
            _block(ops, layer, self._heads, config.hidden_act) for layer in tower.blocks
        ]
        self._norm = norm_of(tower.merger.ln_q)
        self._up = ops.pack(tower.merger.mlp[0], activation="gelu")
        self._down = ops.pack(tower.merger.mlp[2])
        self._plan = lru_cache(_KNOWN_GRIDS)(self._make_plan)

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[patches, values] of items one after the other to [patches / merge^2, hidden size]."""
        plans = [self._plan(grid) for grid in grids]
        cos, sin, order, back = self._upload(plans)
        unit = self._merge**2
        x = self._ops.linear(patches, self._patches)
        if self._window:
            x = x.view(len(order), -1).index_select(0, order).view(len(order) * unit, -1)
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
        rotation = Rotation(cos, sin)
        states = run_blocks(self._ops, self._blocks, x, self._heads, segments, rotation)  # type: ignore[arg-type]
        rows = self._ops.norm(states[len(self._blocks)], self._norm)
        rows = self._ops.linear(rows.view(len(rows) // unit, -1), self._up)
        rows = self._ops.linear(rows, self._down)
        return rows.index_select(0, back) if self._window else rows

    def _upload(self, plans: Sequence["_Plan"]) -> list[Tensor]:
        """Cosines and sines of all items; with windows, the order of their merged patches and the way back."""
        tables = [torch.cat([plan.cos for plan in plans]), torch.cat([plan.sin for plan in plans])]
        if not self._window:
            return [*self._device.upload(*tables), *(torch.empty(0, dtype=torch.int32),) * 2]
        starts = [0, *accumulate(len(plan.order) for plan in plans)]
        orders = zip(plans, starts, strict=False)
        order = torch.cat([plan.order + start for plan, start in orders])
        back = torch.argsort(order)
        return self._device.upload(*tables, order.to(torch.int32), back.to(torch.int32))

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
        cos, sin = self._ops.rotary_table(cos, sin)
        return _Plan(order, cos, sin, [grid[1] * grid[2]] * grid[0], windows)


@dataclass(frozen=True)
class _Plan:
    """What follows from an item's grid alone, on the host: the order of its merged patches, their rotation, and the
    lengths of the stretches that see each other in all and in windowed layers."""

    order: Tensor
    cos: Tensor
    sin: Tensor
    steps: list[int]
    windows: list[int]


def _block(ops: TowerOps, layer: Any, heads: int, activation: str) -> Block:
    mlp = layer.mlp
    if hasattr(mlp, "gate_proj"):
        up = ops.pack(mlp.gate_proj, mlp.up_proj, activation=activation, gated=True)
        down = ops.pack(mlp.down_proj)
    else:
        up, down = ops.pack(mlp.fc1, activation=activation), ops.pack(mlp.fc2)
    return Block(
        norm1=norm_of(layer.norm1),
        qkv=ops.pack_qkv(layer.attn.qkv, heads=heads),
        output=ops.pack_output(layer.attn.proj, heads),
        norm2=norm_of(layer.norm2),
        up=up,
        down=down,
    )
