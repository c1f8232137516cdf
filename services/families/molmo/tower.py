"""Molmo's tower (CLIP's, Radford et al., 2021), pooling and projector (Deitke et al., 2024)."""

from typing import Any

import torch
from torch import Tensor, nn

from services.families.molmo.vision_config import HEADS, MolmoVisionConfig
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import Block, norm_of
from services.vision_encoder.towers.square_tower import SquareTower

_EPS = 1e-5


def molmo_modules(config: MolmoVisionConfig) -> nn.Module:
    """The weights, by the names of checkpoints."""
    width = config.width
    layers = nn.ModuleList(_layer_modules(config) for _ in range(config.layers))
    tower = nn.ModuleDict(
        {
            "patch_embedding": nn.Linear(config.values, width, bias=False),
            "pre_ln": nn.LayerNorm(width, _EPS),
            "transformer": nn.ModuleDict({"resblocks": layers}),
        }
    )
    for name, shape in (
        ("class_embedding", (width,)),
        ("positional_embedding", (config.places, width)),
    ):
        tower.register_parameter(name, nn.Parameter(torch.empty(shape)))
    sizes = {
        "w1": (width, config.projected),
        "w2": (config.projected, config.text_size),
        "w3": (width, config.projected),
    }
    projector = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    made = nn.ModuleDict(
        {
            "image_vit": tower,
            "image_pooling_2d": _attention_modules(2 * width, width),
            "image_projector": nn.ModuleDict(projector),
        }
    )
    made.register_parameter("pad_embed", nn.Parameter(torch.empty(2, 2 * width)))
    return made


class MolmoTower:
    """Patches [views, patches, values] to a row of the language model for each square of patches. Takes the weights
    away from the modules it is made of."""

    def __init__(self, modules: Any, config: MolmoVisionConfig, ops: TowerOps) -> None:
        """modules: those of `molmo_modules`, with the checkpoint's weights."""
        self._ops, self._config = ops, config
        tower, pooling = modules.image_vit, modules.image_pooling_2d
        projector = modules.image_projector
        self._tower = SquareTower(
            ops,
            ops.pack(tower.patch_embedding),
            tower.positional_embedding,
            [_block(ops, block) for block in tower.transformer.resblocks],
            HEADS,
            class_row=tower.class_embedding,
            norm=norm_of(tower.pre_ln),
        )
        self._pads = modules.pad_embed
        self._query, self._output = ops.pack(pooling.wq), ops.pack(pooling.wo)
        self._keys, self._values = ops.pack(pooling.wk), ops.pack(pooling.wv)
        self._up = ops.pack(projector.w1, projector.w3, activation="silu", gated=True)
        self._down = ops.pack(projector.w2)

    def __call__(self, patches: Tensor, empty: Tensor, partial: Tensor) -> Tensor:
        """[views, cells, width of the language model]; empty, partial: see `padded`. One item's views at a time: sums
        of torch are among the operations."""
        ops, layers = self._ops, self._config.taken
        states = self._tower(patches, keep=layers)
        features = torch.cat([states[layer][:, 1:] for layer in layers], -1)
        cells = squares(padded(features, self._pads, empty, partial))
        single = cells.mean(-2).flatten(0, 1).contiguous()
        whole = cells.flatten(0, 2).contiguous()
        query = ops.linear(single, self._query)[:, None]
        keys, values = (
            ops.linear(whole, layer).unflatten(0, (-1, cells.shape[2]))
            for layer in (self._keys, self._values)
        )
        pooled = ops.linear(mix(query, keys, values), self._output)
        rows = ops.linear(ops.linear(pooled, self._up), self._down)
        return rows.view(len(patches), -1, rows.shape[1])


def padded(features: Tensor, embeds: Tensor, empty: Tensor, partial: Tensor) -> Tensor:
    """Adds to patches [views, patches, size] that show nothing of the picture the first of `embeds` [2, size], to those
    that show it in part the second. empty, partial: bool [views, patches]."""
    added = empty[..., None] * embeds[0] + partial[..., None] * embeds[1]
    return features + added


def squares(features: Tensor) -> Tensor:
    """[views, patches, size] as [views, cells, 4, size], a cell's patches row by row."""
    side = round(features.shape[1] ** 0.5)
    apart = features.unflatten(1, (side // 2, 2, side // 2, 2))
    cells: Tensor = apart.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return cells


def mix(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one query [..., 1, size] to some keys and values [..., n, size] in float32; [..., size]."""
    q, k, v = (rows.float().unflatten(-1, (HEADS, -1)) for rows in (query, keys, values))
    weights = ((q * k).sum(-1, keepdim=True) * q.shape[-1] ** -0.5).softmax(-3)
    mixed: Tensor = (weights * v).sum(-3).flatten(-2).to(query.dtype)
    return mixed


def _layer_modules(config: MolmoVisionConfig) -> nn.Module:
    width, inner = config.width, config.inner
    return nn.ModuleDict(
        {
            "attention": _attention_modules(width, width),
            "feed_forward": nn.ModuleDict(
                {"w1": nn.Linear(width, inner), "w2": nn.Linear(inner, width)}
            ),
            "attention_norm": nn.LayerNorm(width, _EPS),
            "ffn_norm": nn.LayerNorm(width, _EPS),
        }
    )


def _attention_modules(inputs: int, width: int) -> nn.Module:
    """Inputs may be wider than what it gives."""
    parts = {name: nn.Linear(inputs, width) for name in ("wq", "wk", "wv")}
    return nn.ModuleDict({**parts, "wo": nn.Linear(width, width)})


def _block(ops: TowerOps, block: Any) -> Block:
    attention = block.attention
    return Block(
        norm1=norm_of(block.attention_norm),
        qkv=ops.pack_qkv(attention.wq, attention.wk, attention.wv, heads=HEADS),
        output=ops.pack_output(attention.wo, HEADS),
        norm2=norm_of(block.ffn_norm),
        up=ops.pack(block.feed_forward.w1, activation="quick_gelu"),
        down=ops.pack(block.feed_forward.w2),
    )
