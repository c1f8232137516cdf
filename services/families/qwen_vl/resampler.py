"""A layer of cross-attention that gives any picture the same number of rows (Bai et al., 2023)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def resampler_modules(queries: int, inputs: int, size: int, eps: float) -> nn.Module:
    """The weights, by the names of Qwen-VL's tensors. queries: a square number; inputs: width of the tower; size: width
    of the result."""
    attention = nn.ModuleDict({"out_proj": nn.Linear(size, size)})
    attention.register_parameter("in_proj_weight", nn.Parameter(torch.empty(3 * size, size)))
    attention.register_parameter("in_proj_bias", nn.Parameter(torch.empty(3 * size)))
    parts = {"ln_q": nn.LayerNorm(size, eps), "ln_kv": nn.LayerNorm(size, eps), "attn": attention}
    if inputs != size:
        parts["kv_proj"] = nn.Linear(inputs, size, bias=False)
    made = nn.ModuleDict(parts)
    for name in ("query", "pos_embed"):
        made.register_parameter(name, nn.Parameter(torch.empty(queries, size)))
    return made


class Resampler:
    """Learned queries attend to a tower's rows, both with places on a square grid."""

    def __init__(self, modules: Any, heads: int) -> None:
        """modules: those of `resampler_modules`."""
        self._modules, self._heads = modules, heads
        self._projects = "kv_proj" in modules

    def __call__(self, x: Tensor) -> Tensor:
        """[n, places, inputs] to [n, queries, size]."""
        own = self._modules
        values = own.ln_kv(own.kv_proj(x) if self._projects else x)
        keys = values + places(own.pos_embed, x.shape[1])
        queries = (own.ln_q(own.query) + own.pos_embed).expand(len(x), -1, -1)
        weights, biases = own.attn.in_proj_weight.chunk(3), own.attn.in_proj_bias.chunk(3)
        q, k, v = (
            functional.linear(rows, weight, bias).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for rows, weight, bias in zip((queries, keys, values), weights, biases, strict=True)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        rows: Tensor = own.attn.out_proj(mixed.transpose(1, 2).flatten(2))
        return rows


def places(table: Tensor, count: int) -> Tensor:
    """Rows [count, size] of a square table [n, size] of places, resized to another square."""
    if len(table) == count:
        return table
    side, wanted = round(len(table) ** 0.5), round(count**0.5)
    grid = table.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resized = functional.interpolate(grid, (wanted, wanted), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).flatten(0, 2).to(table.dtype)
