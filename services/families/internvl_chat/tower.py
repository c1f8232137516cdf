"""InternViT with InternVL's projector on the kernels."""

from typing import Any

import torch
from torch import Tensor

from services.families.internvl_chat.network import InternViTConfig, folded
from services.vision_encoder.devices.cpu import ACTIVATIONS, TowerOps
from services.vision_encoder.towers.blocks import Block, patch_rows, run_blocks
from services.vision_encoder.towers.llava_tower import norm_of


class InternViTTower:
    """Tiles to rows. Takes the weights away from the network it is made of."""

    def __init__(self, network: Any, config: InternViTConfig, ops: TowerOps) -> None:
        """network: that of the checkpoint, with its weights."""
        self._ops, self._config = ops, config
        embeddings = network.vision_model.embeddings
        self._patches = ops.pack(embeddings.patch_embedding)
        places = embeddings.position_embedding[0]
        self._first, self._places = embeddings.class_embedding[0] + places[:1], places[1:]
        self._blocks = [_block(ops, layer) for layer in network.vision_model.encoder.layers]
        norm, up, _, down = network.mlp1
        self._norm = norm_of(norm)
        self._up = ops.pack(up, epilogue=ACTIVATIONS["gelu"])
        self._down = ops.pack(down)

    @staticmethod
    def knows(config: InternViTConfig) -> bool:
        """Whether the kernels have all that the checkpoint asks for."""
        return not config.qk_norms

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, 3, side, side] to [n, rows, hidden size of the language model]."""
        ops, config, count = self._ops, self._config, len(pixels)
        patches = ops.linear(patch_rows(pixels, config.patch_size), self._patches)
        known = patches.view(count, len(self._places), -1) + self._places
        x = torch.cat([self._first.expand(count, 1, -1), known], 1)
        rows = x.shape[1]
        segments = ops.segments([rows] * count, config.heads, config.hidden_size // config.heads)
        shared = [segments] * len(self._blocks)
        states = run_blocks(ops, self._blocks, x.flatten(0, 1), config.heads, shared)
        taken = states[len(self._blocks)].view(count, rows, -1)[:, 1:]
        squares = folded(taken, config)
        normed = ops.add_norm(None, squares.flatten(0, 1).contiguous(), self._norm)
        projected = ops.linear(ops.linear(normed, self._up), self._down)
        return projected.view(count, squares.shape[1], -1)


def _block(ops: TowerOps, layer: Any) -> Block:
    # What scales a branch of the layer is part of its last matrix here.
    for linear, scale in ((layer.attn.proj, layer.ls1), (layer.mlp["fc2"], layer.ls2)):
        linear.weight.mul_(scale[:, None])
        linear.bias.mul_(scale)
    return Block(
        norm1=norm_of(layer.norm1),
        qkv=ops.pack(layer.attn.qkv),
        output=ops.pack(layer.attn.proj),
        norm2=norm_of(layer.norm2),
        up=ops.pack(layer.mlp["fc1"], epilogue=ACTIVATIONS["gelu"]),
        down=ops.pack(layer.mlp["fc2"]),
    )
