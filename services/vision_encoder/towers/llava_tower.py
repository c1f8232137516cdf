"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023) towers with LLaVA's projector on the kernels."""

from typing import Any

import torch
from torch import Tensor

from services.vision_encoder.devices.cpu import ACTIVATIONS, Norm, TowerOps
from services.vision_encoder.towers.blocks import Block, patch_rows, run_blocks
from shared.model_config.llava import LlavaConfig


class LlavaTower:
    """Squares of pixels to projected rows. Takes the weights away from the network it is made of."""

    def __init__(self, network: Any, config: LlavaConfig, ops: TowerOps) -> None:
        """network: that of the checkpoint, with its weights."""
        tower = network.tower
        self._ops = ops
        self._layers = config.layers
        self._heads = config.tower.num_heads
        self._drops_first = config.drops_first
        self._patch = config.tower.patch_size
        self._patches = ops.pack(tower.embeddings.patch_embedding)
        positions = tower.embeddings.position_embedding.weight
        self._class: Tensor | None = getattr(tower.embeddings, "class_embedding", None)
        if self._class is not None:
            self._class = (self._class + positions[0])[None]
            positions = positions[1:]
        self._positions = positions
        first = getattr(tower, "pre_layrnorm", None)
        self._first = None if first is None else norm_of(first)
        activation = ACTIVATIONS[config.tower.activation]
        self._blocks = [_block(ops, layer, activation) for layer in tower.encoder.layers]
        projection = ACTIVATIONS[config.projector_activation]
        self._up = ops.pack(network.projector.linear_1, epilogue=projection)
        self._down = ops.pack(network.projector.linear_2)

    @staticmethod
    def knows(config: LlavaConfig) -> bool:
        """Whether the kernels have the activations that the checkpoint asks for."""
        return {config.tower.activation, config.projector_activation} <= ACTIVATIONS.keys()

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, channels, side, side] to [n, rows, hidden size of the language model]."""
        x = self._embed(pixels)
        count, rows, _ = x.shape
        x = x.flatten(0, 1)
        if self._first is not None:
            x = self._ops.add_norm(None, x, self._first)
        size = x.shape[1] // self._heads
        segments = self._ops.segments([rows] * count, self._heads, size)
        shared = [segments] * len(self._blocks)
        states = run_blocks(self._ops, self._blocks, x, self._heads, shared, keep=self._layers)
        taken = [states[layer].view(count, rows, -1) for layer in self._layers]
        if self._drops_first:
            taken = [state[:, 1:] for state in taken]
        features = torch.cat(taken, dim=-1)
        projected = self._ops.linear(features.flatten(0, 1).contiguous(), self._up)
        return self._ops.linear(projected, self._down).view(count, features.shape[1], -1)

    def _embed(self, pixels: Tensor) -> Tensor:
        """Patches and what is known of their places [n, rows, hidden]."""
        patch, count = self._patch, len(pixels)
        side = pixels.shape[-1] // patch
        x = self._ops.linear(patch_rows(pixels, patch), self._patches).view(count, side * side, -1)
        x += self._positions
        if self._class is None:
            return x
        return torch.cat([self._class.expand(count, 1, -1), x], dim=1)


def norm_of(layer: Any) -> Norm:
    """What a norm of torch or of transformers does."""
    eps = getattr(layer, "eps", None) or layer.variance_epsilon
    return Norm(layer.weight, getattr(layer, "bias", None), float(eps))


def _block(ops: TowerOps, layer: Any, activation: int) -> Block:
    attention = layer.self_attn
    return Block(
        norm1=norm_of(layer.layer_norm1),
        qkv=ops.pack(attention.q_proj, attention.k_proj, attention.v_proj),
        output=ops.pack(attention.out_proj),
        norm2=norm_of(layer.layer_norm2),
        up=ops.pack(layer.mlp.fc1, epilogue=activation),
        down=ops.pack(layer.mlp.fc2),
    )
