"""Molmo's tower (CLIP's, Radford et al., 2021), pooling and projector, in plain torch, under the checkpoint's names."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

PREFIX = "model.vision_backbone."
HEADS = 16
_EPS = 1e-5
_CELL = 4  # patches that are pooled to one row
_AHEAD = 7  # layers between the two whose states are taken


@dataclass(frozen=True)
class MolmoVisionConfig:
    """Sizes, which config.json does not have: those of the stored tensors. `layers`: those that lead to a row."""

    values: int  # of a patch
    places: int  # the class row included
    width: int
    inner: int
    layers: int
    projected: int  # width inside of the projector
    text_size: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "MolmoVisionConfig":
        """Raises InvalidRequest for a checkpoint without these tensors, or whose tower is too small."""
        names, blocks = set(checkpoint.names()), "image_vit.transformer.resblocks"

        def shape(name: str) -> tuple[int, ...]:
            if PREFIX + name not in names:
                raise _bad(checkpoint, f"the checkpoint lacks {PREFIX}{name}")
            return checkpoint.shape(PREFIX + name)

        width, values = shape("image_vit.patch_embedding.weight")
        text_size, projected = shape("image_projector.w2.weight")
        count = sum(f"{PREFIX}{blocks}.{i}.ffn_norm.weight" in names for i in range(len(names)))
        if count < _AHEAD + 2 or width % HEADS:
            raise _bad(checkpoint, f"a tower of {count} layers, {width} wide, with {HEADS} heads")
        return cls(
            values=values,
            places=shape("image_vit.positional_embedding")[0],
            width=width,
            inner=shape(f"{blocks}.0.feed_forward.w1.weight")[0],
            layers=count - 1,  # nothing is taken of the last one
            projected=projected,
            text_size=text_size,
        )

    @property
    def taken(self) -> tuple[int, int]:
        """Numbers of layers behind which the tower's state is taken, in the order in which they stand in a row."""
        return self.layers, self.layers - _AHEAD


class MolmoNetwork(nn.Module):
    """Patches [views, patches, values] to a row of the language model for each square of patches."""

    def __init__(self, config: MolmoVisionConfig) -> None:
        super().__init__()
        both = 2 * config.width
        self.image_vit = _Tower(config)
        self.image_pooling_2d = Attention(both, config.width)
        self.image_projector = nn.ModuleDict(
            {
                "w1": nn.Linear(config.width, config.projected, bias=False),
                "w2": nn.Linear(config.projected, config.text_size, bias=False),
                "w3": nn.Linear(config.width, config.projected, bias=False),
            }
        )
        self.pad_embed = nn.Parameter(torch.empty(2, both))

    def forward(self, patches: Tensor, empty: Tensor, partial: Tensor) -> Tensor:
        """[views, cells, width of the language model]; empty, partial: see `padded`."""
        cells = squares(padded(self.image_vit(patches), self.pad_embed, empty, partial))
        pooling, projector = self.image_pooling_2d, self.image_projector
        query = pooling.wq(cells.mean(-2, keepdim=True))
        mixed = mix(query, pooling.wk(cells), pooling.wv(cells))
        pooled = pooling.wo(mixed)
        rows: Tensor = projector["w2"](
            functional.silu(projector["w1"](pooled)) * projector["w3"](pooled)
        )
        return rows


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


class _Tower(nn.Module):
    def __init__(self, config: MolmoVisionConfig) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(config.width))
        self.positional_embedding = nn.Parameter(torch.empty(config.places, config.width))
        self.patch_embedding = nn.Linear(config.values, config.width, bias=False)
        self.pre_ln = nn.LayerNorm(config.width, _EPS)
        self.transformer = nn.Module()
        blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.transformer.resblocks = blocks
        self._blocks: list[nn.Module] = list(blocks)
        self._taken = config.taken

    def forward(self, patches: Tensor) -> Tensor:
        """[views, patches, 2 * width]: two states side by side."""
        first = self.class_embedding.expand(len(patches), 1, -1)
        x = torch.cat([first, self.patch_embedding(patches)], 1) + self.positional_embedding
        x = self.pre_ln(x)
        states = {}
        for number, block in enumerate(self._blocks, 1):
            x = states[number] = block(x)
        return torch.cat([states[number][:, 1:] for number in self._taken], -1)


class _Block(nn.Module):
    def __init__(self, config: MolmoVisionConfig) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.width)
        self.feed_forward = nn.ModuleDict(
            {
                "w1": nn.Linear(config.width, config.inner),
                "w2": nn.Linear(config.inner, config.width),
            }
        )
        self.attention_norm = nn.LayerNorm(config.width, _EPS)
        self.ffn_norm = nn.LayerNorm(config.width, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        inner = self.feed_forward["w1"](self.ffn_norm(x))
        rows: Tensor = x + self.feed_forward["w2"](inner * torch.sigmoid(1.702 * inner))
        return rows


class Attention(nn.Module):
    """Of all rows to each other; inputs may be wider than what it gives."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(inputs, width) for _ in range(3))
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        rows: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return rows


def _bad(checkpoint: Checkpoint, what: str) -> InvalidRequest:
    return InvalidRequest("BAD_CHECKPOINT", f"{checkpoint.folder}: {what}", field="model")
