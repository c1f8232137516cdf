"""Transformer layers with the norm first, as all our towers have them (Dosovitskiy et al., 2021)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.vision_encoder.devices.cpu import Norm, Rotation, Segments, TowerOps
from shared.cpu_kernels.packed_linear import PackedLinear


@dataclass(frozen=True)
class Block:
    """One layer. `up` holds its activation, or the gate, too."""

    norm1: Norm
    qkv: PackedLinear
    output: PackedLinear
    norm2: Norm
    up: PackedLinear
    down: PackedLinear


def patch_rows(pixels: Tensor, patch: int) -> Tensor:
    """Whole patches of squares [n, channels, side, side], one a row, as a convolution without overlap sees them;
    `patch` is their edge."""
    count, side = len(pixels), pixels.shape[-1] // patch
    whole = pixels[..., : side * patch, : side * patch]
    apart = whole.reshape(count, -1, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
    return apart.reshape(count * side * side, -1)


def run_blocks(
    ops: TowerOps,
    blocks: Sequence[Block],
    x: Tensor,
    heads: int,
    segments: Sequence[Segments],
    rotation: Rotation | None = None,
    keep: Collection[int] = (),
) -> dict[int, Tensor]:
    """Runs layers over [tokens, hidden], which it overwrites; `segments` are those of each layer.

    Returns the states that `keep` names (0 enters the first layer), and always the last one.
    """
    states: dict[int, Tensor] = {}
    added: Tensor | None = None
    for number, (block, seen) in enumerate(zip(blocks, segments, strict=True)):
        if number in keep:
            states[number] = x.clone() if added is None else x + added
        rows = ops.add_norm(added, x, block.norm1)
        mixed = ops.attention(ops.linear(rows, block.qkv), heads, seen, rotation)
        rows = ops.add_norm(ops.linear(mixed, block.output), x, block.norm2)
        added = ops.linear(ops.linear(rows, block.up), block.down)
    states[len(blocks)] = x if added is None else torch.add(x, added)
    return states
