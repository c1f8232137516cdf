"""SigLIP (Zhai et al., 2023) with DeepSeek-VL2's projector, in plain torch, under the checkpoint's names."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.families.deepseek_vl2.vision_config import VisionConfig

_EPS = 1e-6


class DeepSeekVL2Network(nn.Module):
    """Tiles [n, 3, side, side] to rows [n, rows, width of the language model]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.vision = _Tower(config)
        self.projector = nn.Module()
        self.projector.layers = nn.Sequential(
            nn.Linear(config.width * config.fold**2, config.between),
            nn.GELU(),
            nn.Linear(config.between, config.text_size),
        )
        self.image_newline = nn.Parameter(torch.empty(config.text_size))
        self.view_seperator = nn.Parameter(torch.empty(config.text_size))
        self._config = config

    def forward(self, pixels: Tensor) -> Tensor:
        """All tiles at once."""
        rows: Tensor = self.projector.get_submodule("layers")(
            folded(self.vision(pixels), self._config)
        )
        return rows


def folded(x: Tensor, config: VisionConfig) -> Tensor:
    """A map [n, patches, width] with squares of fold x fold patches as one row [n, rows, width * fold^2], channel by
    channel, of each its patches. Zeros fill the last squares where the patches do not."""
    fold, side = config.fold, config.side
    line, missing = config.line, -side % fold
    whole = functional.pad(x.unflatten(1, (side, side)), (0, 0, 0, missing, 0, missing))
    apart = whole.unflatten(1, (line, fold)).unflatten(3, (line, fold))
    rows: Tensor = apart.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
    return rows


class _Tower(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        patch, width = config.patch_size, config.width
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.pos_embed = nn.Parameter(torch.empty(1, config.side**2, width))
        self.blocks = nn.Sequential(*(_Layer(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(width, _EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        rows: Tensor = self.norm(self.blocks(patches + self.pos_embed))
        return rows


class _Layer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1, self.norm2 = nn.LayerNorm(width, _EPS), nn.LayerNorm(width, _EPS)
        self.attn = _Attention(config)
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(width, config.inner), "fc2": nn.Linear(config.inner, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        inner = functional.gelu(self.mlp["fc1"](self.norm2(x)), approximate="tanh")
        rows: Tensor = x + self.mlp["fc2"](inner)
        return rows


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self._heads = config.heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            rows.unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for rows in self.qkv(x).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        rows: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return rows
