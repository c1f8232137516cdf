"""Molmo's tower, pooling and projector on the kernels."""

from typing import Any

import torch
from torch import Tensor

from services.families.molmo.network import HEADS, MolmoVisionConfig, mix, padded, squares
from services.vision_encoder.devices.cpu import ACTIVATIONS, TowerOps
from services.vision_encoder.towers.blocks import Block, run_blocks
from services.vision_encoder.towers.llava_tower import norm_of
from shared.cpu_kernels import binding


class MolmoTower:
    """See `MolmoNetwork`. Takes the weights away from the network it is made of."""

    def __init__(self, network: Any, config: MolmoVisionConfig, ops: TowerOps) -> None:
        """network: that of the checkpoint, with its weights."""
        self._ops, self._config = ops, config
        tower, pooling, projector = (
            network.image_vit,
            network.image_pooling_2d,
            network.image_projector,
        )
        places = tower.positional_embedding
        self._first, self._places = tower.class_embedding + places[0], places[1:]
        self._patches = ops.pack(tower.patch_embedding)
        self._norm = norm_of(tower.pre_ln)
        self._blocks = [_block(ops, block) for block in tower.transformer.resblocks]
        self._pads = network.pad_embed
        self._query, self._output = ops.pack(pooling.wq), ops.pack(pooling.wo)
        self._keys, self._values = ops.pack(pooling.wk), ops.pack(pooling.wv)
        self._up = ops.pack(projector["w1"], projector["w3"], epilogue=binding.SWIGLU)
        self._down = ops.pack(projector["w2"])

    def __call__(self, patches: Tensor, empty: Tensor, partial: Tensor) -> Tensor:
        """See `MolmoNetwork.forward`. One item's views at a time: sums of torch are among the operations."""
        ops, count = self._ops, len(patches)
        cells = squares(padded(self._features(patches), self._pads, empty, partial))
        single = cells.mean(-2).flatten(0, 1).contiguous()
        whole = cells.flatten(0, 2).contiguous()
        query = ops.linear(single, self._query)[:, None]
        keys, values = (
            ops.linear(whole, layer).unflatten(0, (-1, cells.shape[2]))
            for layer in (self._keys, self._values)
        )
        pooled = ops.linear(mix(query, keys, values), self._output)
        rows = ops.linear(ops.linear(pooled, self._up), self._down)
        return rows.view(count, -1, rows.shape[1])

    def _features(self, patches: Tensor) -> Tensor:
        ops, config, count = self._ops, self._config, len(patches)
        known = ops.linear(patches.flatten(0, 1).contiguous(), self._patches)
        known = known.view(count, len(self._places), -1) + self._places
        x = torch.cat([self._first.expand(count, 1, -1), known], 1)
        rows = x.shape[1]
        x = ops.add_norm(None, x.flatten(0, 1), self._norm)
        segments = ops.segments([rows] * count, HEADS, config.width // HEADS)
        shared = [segments] * len(self._blocks)
        states = run_blocks(ops, self._blocks, x, HEADS, shared, keep=config.taken)
        taken = [states[layer].view(count, rows, -1)[:, 1:] for layer in config.taken]
        return torch.cat(taken, -1)


def _block(ops: TowerOps, block: Any) -> Block:
    attention = block.attention
    return Block(
        norm1=norm_of(block.attention_norm),
        qkv=ops.pack(attention.wq, attention.wk, attention.wv),
        output=ops.pack(attention.wo),
        norm2=norm_of(block.ffn_norm),
        up=ops.pack(block.feed_forward["w1"], epilogue=ACTIVATIONS["quick_gelu"]),
        down=ops.pack(block.feed_forward["w2"]),
    )
