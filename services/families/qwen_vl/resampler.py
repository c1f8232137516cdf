"""A layer of cross-attention that gives any picture the same number of rows (Bai et al., 2023)."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Resampler(nn.Module):
    """Learned queries attend to a tower's rows, both with places on a square grid.

    Modules have the names of Qwen-VL's tensors.
    """

    def __init__(self, queries: int, inputs: int, size: int, heads: int, eps: float) -> None:
        """queries: a square number; inputs: width of the tower; size: width of the result."""
        super().__init__()
        self.query = nn.Parameter(torch.empty(queries, size))
        self.pos_embed = nn.Parameter(torch.empty(queries, size))
        if inputs != size:
            self.kv_proj = nn.Linear(inputs, size, bias=False)
        self.ln_q = nn.LayerNorm(size, eps)
        self.ln_kv = nn.LayerNorm(size, eps)
        self.attn = nn.Module()
        self.attn.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.attn.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.attn.out_proj = nn.Linear(size, size)
        self._heads, self._projects = heads, inputs != size

    def forward(self, x: Tensor) -> Tensor:
        """[n, places, inputs] to [n, queries, size]."""
        values = self.ln_kv(self.kv_proj(x) if self._projects else x)
        keys = values + places(self.pos_embed, x.shape[1])
        queries = (self.ln_q(self.query) + self.pos_embed).expand(len(x), -1, -1)
        weights = self.attn.get_parameter("in_proj_weight").chunk(3)
        biases = self.attn.get_parameter("in_proj_bias").chunk(3)
        q, k, v = (
            functional.linear(rows, weight, bias).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for rows, weight, bias in zip((queries, keys, values), weights, biases, strict=True)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        rows: Tensor = self.attn.get_submodule("out_proj")(mixed.transpose(1, 2).flatten(2))
        return rows


def places(table: Tensor, count: int) -> Tensor:
    """Rows [count, size] of a square table [n, size] of places, resized to another square."""
    if len(table) == count:
        return table
    side, wanted = round(len(table) ** 0.5), round(count**0.5)
    grid = table.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resized = functional.interpolate(grid, (wanted, wanted), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).flatten(0, 2).to(table.dtype)
