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
from services.vision_encoder.devices.base.ops import Norm, Rotation, TowerOps
from services.vision_encoder.towers.blocks import Block, load_norm, run_blocks
from shared.weights.linear_weight import StackedWeight
from shared.weights.named_weights import NamedWeights

Grid = tuple[int, int, int]

_KNOWN_GRIDS = 16
_EPS = 1e-6


class QwenTower:
    """Packed patches to merged rows."""

    def __init__(self, weights: NamedWeights, config: Any, rotary: Any, device: Device) -> None:
        """weights: tensors by transformers' names. config: its configuration of the tower; rotary: its module of that
        tower's frequencies, on the host."""
        self._device, self._ops = device, device.ops
        self._heads = int(config.num_heads)
        self._merge = int(config.spatial_merge_size)
        self._rotary = rotary
        sizes = _Sizes.of(config)
        width, layers = sizes.width, range(config.depth)
        windowed = sizes.is_windowed
        self._window = (int(config.window_size), int(config.patch_size)) if windowed else None
        self._sees_all = set(config.fullatt_block_indexes if windowed else layers)
        edge = config.patch_size
        kernel = (config.in_channels, config.temporal_patch_size, edge, edge)
        self._patches = self._ops.pack(weights.take_convolution("patch_embed.proj", width, *kernel))
        self._blocks = [_block(weights, f"blocks.{i}", config, sizes, self._ops) for i in layers]
        self._norm = _norm(weights, "merger.ln_q", sizes, self._ops)
        merged = width * self._merge**2
        up = weights.take_linear("merger.mlp.0", merged, merged, True)
        self._up = self._ops.pack(up, "gelu")
        self._down = self._ops.pack(weights.take_linear("merger.mlp.2", sizes.text, merged, True))
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


@dataclass(frozen=True)
class _Sizes:
    """What the two versions have under different names: the width of rows, inside of the MLPs, and of the language
    model. Version 2.5 has windows, RMS norms and gates."""

    width: int
    inner: int
    text: int
    is_windowed: bool

    @classmethod
    def of(cls, config: Any) -> "_Sizes":
        if hasattr(config, "fullatt_block_indexes"):
            return cls(config.hidden_size, config.intermediate_size, config.out_hidden_size, True)
        width = config.embed_dim
        return cls(width, int(width * config.mlp_ratio), config.hidden_size, False)


def _block(weights: NamedWeights, layer: str, config: Any, sizes: _Sizes, ops: TowerOps) -> Block:
    width, inner, heads = sizes.width, sizes.inner, int(config.num_heads)
    attention, mlp = f"{layer}.attn", f"{layer}.mlp"
    if sizes.is_windowed:
        gated = [
            weights.take_linear(f"{mlp}.{name}_proj", inner, width, True) for name in ("gate", "up")
        ]
        up = ops.pack(StackedWeight(gated), config.hidden_act, gated=True)
        down = weights.take_linear(f"{mlp}.down_proj", width, inner, True)
    else:
        up = ops.pack(weights.take_linear(f"{mlp}.fc1", inner, width, True), config.hidden_act)
        down = weights.take_linear(f"{mlp}.fc2", width, inner, True)
    qkv = weights.take_linear(f"{attention}.qkv", 3 * width, width, True)
    output = weights.take_linear(f"{attention}.proj", width, width, True)
    return Block(
        norm1=_norm(weights, f"{layer}.norm1", sizes, ops),
        qkv=ops.pack_qkv(qkv, heads),
        output=ops.pack_output(output, heads),
        norm2=_norm(weights, f"{layer}.norm2", sizes, ops),
        up=up,
        down=ops.pack(down),
    )


def _norm(weights: NamedWeights, name: str, sizes: _Sizes, ops: TowerOps) -> Norm:
    return load_norm(weights, name, sizes.width, _EPS, ops, bias=not sizes.is_windowed)
