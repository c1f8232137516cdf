"""Qwen-VL's tower (after OpenCLIP's ViT-bigG); its resampler, a layer of few rows, stays in torch, one picture at a
time."""

from typing import Any

import torch
from torch import Tensor, nn

from services.families.qwen_vl.resampler import Resampler, places, resampler_modules
from services.families.qwen_vl.sizes import ROWS, VisualConfig
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import Block, norm_of, patch_rows
from services.vision_encoder.towers.square_tower import SquareTower

_EPS = 1e-6
_HEAD = 128  # elements of a head of the resampler


def qwen_vl_modules(config: VisualConfig) -> nn.Module:
    """The weights, by the names of checkpoints."""
    width, output, patch = config.width, config.output, config.patch_size
    layers = nn.ModuleList(_layer_modules(config) for _ in range(config.layers))
    made = nn.ModuleDict(
        {
            "conv1": nn.Conv2d(3, width, patch, patch, bias=False),
            "ln_pre": nn.LayerNorm(width, _EPS),
            "transformer": nn.ModuleDict({"resblocks": layers}),
            "attn_pool": resampler_modules(ROWS, width, output, _EPS),
            "ln_post": nn.LayerNorm(output, _EPS),
        }
    )
    made.register_parameter("positional_embedding", nn.Parameter(torch.empty(ROWS, width)))
    made.register_parameter("proj", nn.Parameter(torch.empty(output, output)))
    return made


class QwenVLTower:
    """Pictures to rows. Takes the tower's weights away from the modules it is made of."""

    def __init__(self, modules: Any, config: VisualConfig, ops: TowerOps) -> None:
        """modules: those of `qwen_vl_modules`, with the checkpoint's weights."""
        self._config = config
        count = (config.image_size // config.patch_size) ** 2
        self._tower = SquareTower(
            ops,
            ops.pack(modules.conv1),
            places(modules.positional_embedding, count),
            [_block(ops, block, config.heads) for block in modules.transformer.resblocks],
            config.heads,
            norm=norm_of(modules.ln_pre),
        )
        self._pool = Resampler(modules.attn_pool, max(1, config.output // _HEAD))
        self._after, self._projection = modules.ln_post, modules.proj

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, 3, side, side] to [n, rows, hidden size of the language model]."""
        states = self._tower(patch_rows(pixels, self._config.patch_size))
        pictures = states[self._config.layers].split(1)
        return torch.cat([self._after(self._pool(one)) @ self._projection for one in pictures])


def _layer_modules(config: VisualConfig) -> nn.Module:
    width, inner = config.width, config.inner
    attention = {"in_proj": nn.Linear(width, 3 * width), "out_proj": nn.Linear(width, width)}
    mlp = {"c_fc": nn.Linear(width, inner), "c_proj": nn.Linear(inner, width)}
    return nn.ModuleDict(
        {
            "ln_1": nn.LayerNorm(width, _EPS),
            "attn": nn.ModuleDict(attention),
            "ln_2": nn.LayerNorm(width, _EPS),
            "mlp": nn.ModuleDict(mlp),
        }
    )


def _block(ops: TowerOps, block: Any, heads: int) -> Block:
    # Each head's queries, keys and values lie together; all queries come first here, then all keys and all values.
    merged = block.attn.in_proj
    for name in ("weight", "bias"):
        stored = getattr(merged, name).data
        apart = stored.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        setattr(merged, name, nn.Parameter(apart.contiguous(), requires_grad=False))
    return Block(
        norm1=norm_of(block.ln_1),
        qkv=ops.pack_qkv(merged, heads=heads),
        output=ops.pack_output(block.attn.out_proj, heads),
        norm2=norm_of(block.ln_2),
        up=ops.pack(block.mlp.c_fc, activation="gelu"),
        down=ops.pack(block.mlp.c_proj),
    )
