"""Transformer layers with the norm first, as all our towers have them (Dosovitskiy et al., 2021)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.vision_encoder.devices.base.ops import Norm, Packed, Rotation, Segments, TowerOps
from shared.weights.named_weights import NamedWeights


@dataclass(frozen=True)
class Block:
    """One layer. `up` holds its activation, or the gate, too; `head_norms` are those of all queries and of all keys of
    a row, where the layer has such."""

    norm1: Norm
    qkv: Packed
    output: Packed
    norm2: Norm
    up: Packed
    down: Packed
    head_norms: tuple[Norm, Norm] | None = None


def load_norm(
    weights: NamedWeights, name: str, size: int, eps: float, ops: TowerOps, bias: bool = True
) -> Norm:
    """A layer norm, or without a bias an RMS norm: the tensors `name`.weight and `name`.bias [size]."""
    shift = ops.vector(weights.take(f"{name}.bias", size)) if bias else None
    return Norm(ops.vector(weights.take(f"{name}.weight", size)), shift, eps)


def patch_rows(pixels: Tensor, patch: int) -> Tensor:
    """Whole patches of pictures [n, channels, height, width] of one size, one a row [n, patches, values], as a
    convolution without overlap sees them; `patch` is their edge."""
    count, (height, width) = len(pixels), (size // patch for size in pixels.shape[-2:])
    whole = pixels[..., : height * patch, : width * patch]
    apart = whole.reshape(count, -1, height, patch, width, patch).permute(0, 2, 4, 1, 3, 5)
    return apart.reshape(count, height * width, -1)


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
        if added is None:
            rows = ops.norm(x, block.norm1)
        else:
            rows, x = ops.add_norm(added, x, block.norm1)
        rows = ops.linear(rows, block.qkv)
        if block.head_norms is not None:
            rows = _with_head_norms(ops, rows, block.head_norms)
        mixed = ops.attention(rows, heads, seen, rotation)
        rows, x = ops.add_norm(ops.linear(mixed, block.output), x, block.norm2)
        added = ops.linear(ops.linear(rows, block.up), block.down)
    states[len(blocks)] = x if added is None else torch.add(x, added)
    return states


def _with_head_norms(ops: TowerOps, qkv: Tensor, norms: tuple[Norm, Norm]) -> Tensor:
    queries, keys, values = qkv.chunk(3, dim=1)
    apart = zip((queries, keys), norms, strict=True)
    normed = [ops.norm(rows.contiguous(), norm) for rows, norm in apart]
    return torch.cat([*normed, values], dim=1)
