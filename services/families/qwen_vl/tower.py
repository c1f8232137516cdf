"""Qwen-VL's tower on the kernels; its resampler, a layer of few rows, stays in torch, one picture at a time."""

from typing import Any

import torch
from torch import Tensor

from services.families.qwen_vl.resampler import places
from services.families.qwen_vl.sizes import VisualConfig
from services.vision_encoder.devices.cpu import ACTIVATIONS, TowerOps
from services.vision_encoder.towers.blocks import Block, patch_rows, run_blocks
from services.vision_encoder.towers.llava_tower import norm_of


class QwenVLTower:
    """Pictures to rows. Takes the weights away from the network it is made of."""

    def __init__(self, network: Any, config: VisualConfig, ops: TowerOps) -> None:
        """network: that of the checkpoint, with its weights."""
        self._network, self._ops, self._config = network, ops, config
        self._patches = ops.pack(network.conv1)
        count = (config.image_size // config.patch_size) ** 2
        self._positions = places(network.positional_embedding, count)
        self._first = norm_of(network.ln_pre)
        blocks = network.transformer.resblocks
        self._blocks = [_block(ops, block, config.heads) for block in blocks]

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, 3, side, side] to [n, rows, hidden size of the language model]."""
        ops, config, count = self._ops, self._config, len(pixels)
        x = ops.linear(patch_rows(pixels, config.patch_size), self._patches)
        x += self._positions.repeat(count, 1)
        x = ops.add_norm(None, x, self._first)
        places_each = len(self._positions)
        size = config.width // config.heads
        segments = ops.segments([places_each] * count, config.heads, size)
        shared = [segments] * len(self._blocks)
        states = run_blocks(ops, self._blocks, x, config.heads, shared)
        apart = states[len(self._blocks)].view(count, 1, places_each, -1)
        return torch.cat([self._network.pool(picture) for picture in apart])


def _block(ops: TowerOps, block: Any, heads: int) -> Block:
    # The kernels want all queries first, then all keys and all values.
    merged = block.attn.in_proj
    for name in ("weight", "bias"):
        stored = getattr(merged, name).data
        apart = stored.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        setattr(merged, name, torch.nn.Parameter(apart.contiguous(), requires_grad=False))
    return Block(
        norm1=norm_of(block.ln_1),
        qkv=ops.pack(merged),
        output=ops.pack(block.attn.out_proj),
        norm2=norm_of(block.ln_2),
        up=ops.pack(block.mlp["c_fc"], epilogue=ACTIVATIONS["gelu"]),
        down=ops.pack(block.mlp["c_proj"]),
    )
