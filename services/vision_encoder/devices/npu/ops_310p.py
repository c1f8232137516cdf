"""Operations of towers on Ascend 310P: weights as its matrix unit reads them, attention by NNAL."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch_npu
from torch import Tensor

from services.vision_encoder.devices.base.ops import Norm, Packed
from services.vision_encoder.devices.npu.ops import NpuOps

_NZ = 29  # the number of the format FRACTAL_NZ
_TILE = 16  # elements
_LEAST_NORM_BYTES = 32  # of a row
_ROTATIONS = (64, 128)  # elements of a head that the operator turns
_GATE_ROUNDING = 32  # elements: rows of others the operator for gates does not take


class Npu310POps(NpuOps):
    """float16 alone."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Short rows are normed one operator after the other."""
        if x.shape[-1] * x.itemsize < _LEAST_NORM_BYTES:
            return super(NpuOps, self).norm(x, norm)
        return super().norm(x, norm)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The same."""
        if x.shape[-1] * x.itemsize < _LEAST_NORM_BYTES:
            return super(NpuOps, self).add_norm(x, residual, norm)
        return super().add_norm(x, residual, norm)

    def _pack_dense(
        self, weight: Tensor, bias: Tensor | None, activation: str, gated: bool
    ) -> Packed:
        made = super()._pack_dense(weight, bias, activation, gated)
        if not all(size > _TILE and size % _TILE == 0 for size in weight.shape):
            return made
        return replace(made, weight=torch_npu.npu_format_cast(made.weight, _NZ))

    def _has_gate(self, layer: Packed) -> bool:
        return layer.weight.shape[0] % _GATE_ROUNDING == 0

    def _turned(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """By the operator that turns queries and keys at once: that of the other chips is documented for this one with
        compilation at every new shape alone."""
        if rows.shape[-1] not in _ROTATIONS:
            first, second = rows.chunk(2, -1)
            return rows * cos + torch.cat([-second, first], -1) * sin
        turned = torch_npu.npu_apply_rotary_pos_emb(rows[:1], rows[1:], cos, sin)
        return torch.cat(turned)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], size: int) -> Tensor:
        mixed = torch.empty_like(q)
        torch_npu._npu_flash_attention_unpad(
            q, k, v, _on_host(tuple(lengths)), size**-0.5, q.shape[1], q.shape[1], mixed
        )
        return mixed


@lru_cache(maxsize=16)
def _on_host(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32)
