"""Molmo's tower (CLIP's, Radford et al., 2021), pooling and projector (Deitke et al., 2024)."""

import torch
from torch import Tensor

from services.families.molmo.vision_config import HEADS, MolmoVisionConfig
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import Block, load_norm
from services.vision_encoder.towers.square_tower import SquareTower
from shared.weights.linear_weight import StackedWeight
from shared.weights.named_weights import NamedWeights

_EPS = 1e-5
_TOWER, _POOLING, _PROJECTOR = "image_vit", "image_pooling_2d", "image_projector"


class MolmoTower:
    """Patches [views, patches, values] to a row of the language model for each square of patches."""

    def __init__(self, weights: NamedWeights, config: MolmoVisionConfig, ops: TowerOps) -> None:
        """weights: tensors by the names of checkpoints behind their common prefix."""
        self._ops, self._config = ops, config
        width, between = config.width, config.projected
        layers = f"{_TOWER}.transformer.resblocks"
        positions = weights.take(f"{_TOWER}.positional_embedding", config.places, width)
        self._tower = SquareTower(
            ops,
            ops.pack(weights.take_linear(f"{_TOWER}.patch_embedding", width, config.values)),
            ops.vector(positions),
            [_block(weights, f"{layers}.{i}", config, ops) for i in range(config.layers)],
            HEADS,
            class_row=ops.vector(weights.take(f"{_TOWER}.class_embedding", width)),
            norm=load_norm(weights, f"{_TOWER}.pre_ln", width, _EPS, ops),
        )
        self._pads = ops.vector(weights.take("pad_embed", 2, 2 * width))
        self._query, self._keys, self._values = (
            ops.pack(weights.take_linear(f"{_POOLING}.{name}", width, 2 * width, True))
            for name in ("wq", "wk", "wv")
        )
        self._output = ops.pack(weights.take_linear(f"{_POOLING}.wo", width, width, True))
        gate, up = (
            weights.take_linear(f"{_PROJECTOR}.{name}", between, width) for name in ("w1", "w3")
        )
        self._up = ops.pack(StackedWeight([gate, up]), "silu", gated=True)
        self._down = ops.pack(weights.take_linear(f"{_PROJECTOR}.w2", config.text_size, between))

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


def _block(weights: NamedWeights, layer: str, config: MolmoVisionConfig, ops: TowerOps) -> Block:
    width, inner = config.width, config.inner
    qkv, attention, mlp = ("wq", "wk", "wv"), f"{layer}.attention", f"{layer}.feed_forward"
    parts = [weights.take_linear(f"{attention}.{name}", width, width, True) for name in qkv]
    output = weights.take_linear(f"{attention}.wo", width, width, True)
    return Block(
        norm1=load_norm(weights, f"{layer}.attention_norm", width, _EPS, ops),
        qkv=ops.pack_qkv(StackedWeight(parts), HEADS),
        output=ops.pack_output(output, HEADS),
        norm2=load_norm(weights, f"{layer}.ffn_norm", width, _EPS, ops),
        up=ops.pack(weights.take_linear(f"{mlp}.w1", inner, width, True), "quick_gelu"),
        down=ops.pack(weights.take_linear(f"{mlp}.w2", width, inner, True)),
    )
