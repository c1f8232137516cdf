"""A layer of cross-attention that gives any picture the same number of rows (Bai et al., 2023)."""

from torch import Tensor
from torch.nn import functional

from services.families.qwen_vl.sizes import ROWS
from services.vision_encoder.devices.base.ops import Packed, TowerOps
from services.vision_encoder.towers.blocks import load_norm
from shared.weights.named_weights import NamedWeights


class Resampler:
    """Learned queries attend to a tower's rows, both with places on a square grid."""

    def __init__(
        self,
        weights: NamedWeights,
        name: str,
        inputs: int,
        size: int,
        heads: int,
        eps: float,
        ops: TowerOps,
    ) -> None:
        """weights: tensors `name`.X. inputs: width of the tower; size: width of the result."""
        self._ops, self._heads = ops, heads
        self._query, self._places = (
            ops.vector(weights.take(f"{name}.{table}", ROWS, size))
            for table in ("query", "pos_embed")
        )
        self._query_norm, self._key_norm = (
            load_norm(weights, f"{name}.{norm}", size, eps, ops) for norm in ("ln_q", "ln_kv")
        )
        self._widen: Packed | None = None
        if inputs != size:
            self._widen = ops.pack(weights.take_linear(f"{name}.kv_proj", size, inputs))
        merged = weights.take_linear(f"{name}.attn.in_proj", 3 * size, size, True)
        self._qkv = [
            ops.pack(merged.shard("out", [(first, first + size)]))
            for first in range(0, 3 * size, size)
        ]
        self._output = ops.pack(weights.take_linear(f"{name}.attn.out_proj", size, size, True))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, places, inputs] to [n, queries, size]."""
        ops = self._ops
        rows = x if self._widen is None else ops.linear(x, self._widen)
        values = ops.norm(rows, self._key_norm)
        keys = values + places(self._places, x.shape[1])
        queries = ops.norm(self._query, self._query_norm) + self._places
        given = (queries.expand(len(x), -1, -1), keys, values)
        q, k, v = (
            ops.linear(rows, layer).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for rows, layer in zip(given, self._qkv, strict=True)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return ops.linear(mixed.transpose(1, 2).flatten(2), self._output)


def places(table: Tensor, count: int) -> Tensor:
    """Rows [count, size] of a square table [n, size] of places, resized to another square."""
    if len(table) == count:
        return table
    side, wanted = round(len(table) ** 0.5), round(count**0.5)
    grid = table.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resized = functional.interpolate(grid, (wanted, wanted), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).flatten(0, 2).to(table.dtype)
