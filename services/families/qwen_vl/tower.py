"""Qwen-VL's tower (after OpenCLIP's ViT-bigG); its resampler, a layer of few rows, stays in torch, one picture at a
time."""

import numpy as np
import torch
from torch import Tensor

from services.families.qwen_vl.resampler import Resampler, places
from services.families.qwen_vl.sizes import ROWS, VisualConfig
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import Block, load_norm, patch_rows
from services.vision_encoder.towers.square_tower import SquareTower
from shared.weights.named_weights import NamedWeights

_EPS = 1e-6
_HEAD = 128  # elements of a head of the resampler


class QwenVLTower:
    """Pictures to rows."""

    def __init__(self, weights: NamedWeights, config: VisualConfig, ops: TowerOps) -> None:
        """weights: tensors by the names of checkpoints behind their common prefix."""
        self._config = config
        width, output, patch = config.width, config.output, config.patch_size
        count = (config.image_size // patch) ** 2
        positions = ops.vector(weights.take("positional_embedding", ROWS, width))
        layers = "transformer.resblocks"
        self._tower = SquareTower(
            ops,
            ops.pack(weights.take_convolution("conv1", width, 3, patch, patch)),
            places(positions, count),
            [_block(weights, f"{layers}.{i}", config, ops) for i in range(config.layers)],
            config.heads,
            norm=load_norm(weights, "ln_pre", width, _EPS, ops),
        )
        heads = max(1, output // _HEAD)
        self._plain = TowerOps(ops.device, ops.dtype)
        self._pool = Resampler(weights, "attn_pool", width, output, heads, _EPS, self._plain)
        self._after = load_norm(weights, "ln_post", output, _EPS, ops)
        self._projection = ops.vector(weights.take("proj", output, output))

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, 3, side, side] to [n, rows, hidden size of the language model]."""
        states = self._tower(patch_rows(pixels, self._config.patch_size))
        pictures = states[self._config.layers].split(1)
        return torch.cat([self._project(one) for one in pictures])

    def _project(self, picture: Tensor) -> Tensor:
        return self._plain.norm(self._pool(picture), self._after) @ self._projection


def _block(weights: NamedWeights, layer: str, config: VisualConfig, ops: TowerOps) -> Block:
    width, inner, heads = config.width, config.inner, config.heads
    qkv = weights.take_linear(f"{layer}.attn.in_proj", 3 * width, width, True)
    # Each head's queries, keys and values lie together; all queries come first here, then all keys and all values.
    order = np.arange(3 * width).reshape(heads, 3, -1).swapaxes(0, 1).flatten()
    output = weights.take_linear(f"{layer}.attn.out_proj", width, width, True)
    return Block(
        norm1=load_norm(weights, f"{layer}.ln_1", width, _EPS, ops),
        qkv=ops.pack_qkv(qkv.reordered(order.tolist()), heads),
        output=ops.pack_output(output, heads),
        norm2=load_norm(weights, f"{layer}.ln_2", width, _EPS, ops),
        up=ops.pack(weights.take_linear(f"{layer}.mlp.c_fc", inner, width, True), "gelu"),
        down=ops.pack(weights.take_linear(f"{layer}.mlp.c_proj", width, inner, True)),
    )
