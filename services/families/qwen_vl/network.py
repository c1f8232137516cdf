"""Qwen-VL's tower (after OpenCLIP's ViT-bigG) and resampler, in plain torch, under the checkpoint's names."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.families.qwen_vl.resampler import Resampler, places
from services.families.qwen_vl.sizes import ROWS, VisualConfig

_EPS = 1e-6
_HEAD = 128  # elements of a head of the resampler


class QwenVLNetwork(nn.Module):
    """Pixels [n, 3, side, side] to rows [n, rows, width of the language model]."""

    def __init__(self, config: VisualConfig) -> None:
        super().__init__()
        width, output = config.width, config.output
        self.conv1 = nn.Conv2d(3, width, config.patch_size, config.patch_size, bias=False)
        self.positional_embedding = nn.Parameter(torch.empty(ROWS, width))
        self.ln_pre = nn.LayerNorm(width, _EPS)
        self.transformer = nn.Module()
        blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.transformer.resblocks = blocks
        self.attn_pool = Resampler(ROWS, width, output, max(1, output // _HEAD), _EPS)
        self.ln_post = nn.LayerNorm(output, _EPS)
        self.proj = nn.Parameter(torch.empty(output, output))
        self._blocks: list[nn.Module] = list(blocks)

    def forward(self, pixels: Tensor) -> Tensor:
        """All pictures at once."""
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = self.ln_pre(x + places(self.positional_embedding, x.shape[1]))
        for block in self._blocks:
            x = block(x)
        return self.pool(x)

    def pool(self, x: Tensor) -> Tensor:
        """Rows of the tower's [n, patches, width]."""
        rows: Tensor = self.ln_post(self.attn_pool(x)) @ self.proj
        return rows


class _Block(nn.Module):
    def __init__(self, config: VisualConfig) -> None:
        super().__init__()
        width = config.width
        self.ln_1 = nn.LayerNorm(width, _EPS)
        self.attn = _Attention(width, config.heads)
        self.ln_2 = nn.LayerNorm(width, _EPS)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, config.inner), "c_proj": nn.Linear(config.inner, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        rows: Tensor = x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return rows


class _Attention(nn.Module):
    """`in_proj` has each head's queries, keys and values one after the other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        apart = self.in_proj(x).unflatten(-1, (self._heads, 3, -1))
        q, k, v = apart.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        rows: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return rows
