"""Operations of towers on Ascend 910B and later: fused operators of torch_npu. None of them waits for the device."""

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise

import structlog
import torch
import torch_npu
from torch import Tensor, nn

from services.vision_encoder.devices.base.ops import (
    Norm,
    Packed,
    Rotation,
    Segments,
    TowerOps,
)
from shared.artifacts.pixel_scaling import PixelScaling
from shared.weights.heads import head_places
from shared.weights.linear_weight import LinearWeight

log = structlog.get_logger(__name__)

_HEAD_SIZES = (64, 128, 192)  # that the attention kernel takes for packed rows (TND)
_MOST_SEGMENTS = 4096  # in a call of it
_TRIED = (1, 70, 3)  # segments of the trial of a head size
_TOLERANCE = 0.05  # of normal values in 16 bits


class NpuOps(TowerOps):
    """Heads are filled up with zeros to a size that the attention kernel takes, when the weights are packed: the halves
    of a head, which a rotation pairs, begin at 0 and in the middle."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._kernel_size = cache(self._find_size)

    def pack_qkv(self, weight: LinearWeight, heads: int) -> Packed:
        """Outputs are filled up."""
        size = weight.out // (3 * heads)
        width = self._padded_size(size)
        places = head_places(3 * heads, size, width)
        return self.pack(weight.spread("out", places, 3 * heads * width))

    def pack_output(self, weight: LinearWeight, heads: int) -> Packed:
        """Inputs are filled up."""
        size = weight.inputs // heads
        width = self._padded_size(size)
        return self.pack(weight.spread("in", head_places(heads, size, width), heads * width))

    def head_norm(self, norm: Norm, heads: int) -> Norm:
        """Zeros among the elements lower their mean square: weight and eps make up for it."""
        apart = norm.weight.view(heads, -1)
        wide = self._wide(apart)
        share = apart.shape[1] / wide.shape[1]
        return Norm((wide * share**0.5).flatten().to(self.dtype), None, norm.eps * share)

    def linear(self, x: Tensor, layer: Packed) -> Tensor:
        """With the kernel for gates by SiLU."""
        if not (layer.gated and layer.activation == "silu" and self._has_gate(layer)):
            return super().linear(x, layer)
        rows = nn.functional.linear(x, layer.weight, layer.bias)
        mixed: Tensor = torch_npu.npu_swiglu(rows)
        return mixed

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Of each row."""
        if norm.bias is not None:
            return super().norm(x, norm)
        normed: Tensor = torch_npu.npu_rms_norm(x, norm.weight, norm.eps)[0]
        return normed

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The sum of an RMS norm is made by the same operator."""
        if norm.bias is not None:
            return super().add_norm(x, residual, norm)
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, norm.weight, norm.eps)
        return normed, total

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """In the element type, filled up as heads are; the operator puts the sign itself."""
        return self._wide(cos).to(self.dtype), self._wide(sin).to(self.dtype)

    def attention(
        self, qkv: Tensor, heads: int, segments: Segments, rotation: Rotation | None
    ) -> Tensor:
        """By the fused kernel, whose lengths are those of the host."""
        apart = qkv.unflatten(1, (3, heads, -1))
        if self._kernel_size(segments.size) is None:
            plain = None if rotation is None else _with_signs(rotation)
            return super().attention(qkv, heads, segments, plain)
        rows = apart.transpose(0, 1).contiguous()  # [3, tokens, heads, size]
        queries_and_keys = rows[:2]
        if rotation is not None:
            cos, sin = (table[None, :, None].contiguous() for table in (rotation.cos, rotation.sin))
            queries_and_keys = self._turned(queries_and_keys, cos, sin)
        q, k = queries_and_keys.unbind()
        mixed = [
            self._attend(q[some], k[some], rows[2, some], lengths, segments.size)
            for some, lengths in _calls(segments.lengths)
        ]
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(1)

    def scale_pixels(self, raw: Tensor, scaling: PixelScaling) -> Tensor:
        """As one product and one sum in float32: within its rounding of the processor's values."""
        factor, offset = _pixel_line(scaling, raw.device)
        return torch.addcmul(offset, raw.float(), factor).to(self.dtype)

    def attention_by(self, size: int) -> str:
        """What computes attention of heads of `size`, for people."""
        padded = self._kernel_size(size)
        if padded is None:
            return "plain torch"
        return "fused" if padded == size else f"fused, as heads of {padded}"

    def _padded_size(self, size: int) -> int:
        return self._kernel_size(size) or size

    def _turned(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates [2, tokens, heads, padded size]; cos, sin: [1, tokens, 1, padded size]."""
        turned: Tensor = torch_npu.npu_rotary_mul(rows, cos, sin)
        return turned

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], size: int) -> Tensor:
        """[tokens, heads, padded size] of segments of so many tokens; size: of a head without zeros."""
        ends = list(accumulate(lengths))
        mixed: Tensor = torch_npu.npu_fused_infer_attention_score(
            q,
            k,
            v,
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=ends,
            num_heads=q.shape[1],
            num_key_value_heads=q.shape[1],
            scale=size**-0.5,
            input_layout="TND",
            sparse_mode=0,
        )[0]
        return mixed

    def _has_gate(self, layer: Packed) -> bool:
        """Whether the operator takes rows of this layer's outputs."""
        return True

    def _wide(self, x: Tensor) -> Tensor:
        """[..., size] with zeros behind each half."""
        size = x.shape[-1]
        padded = self._padded_size(size)
        if padded == size:
            return x.contiguous()
        halves = x.unflatten(-1, (2, -1))
        return nn.functional.pad(halves, (0, (padded - size) // 2)).flatten(-2)

    def _find_size(self, size: int) -> int | None:
        """The smallest size from this one on with which the attention kernel gives what plain torch does: documents and
        releases disagree. None if there is none: then plain torch computes."""
        generator = torch.Generator().manual_seed(0)
        shape = (3, sum(_TRIED), 2, size)
        drawn = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        flat = drawn.transpose(0, 1).flatten(1).contiguous()
        expected = super().attention(flat, 2, Segments(_TRIED, size), None)
        for padded in _HEAD_SIZES:
            if padded < size:
                continue
            wide = nn.functional.pad(drawn, (0, padded - size))
            try:
                q, k, v = wide.unbind()
                found = self._attend(q, k, v, _TRIED, size)[..., :size].flatten(1)
                if float((found.float() - expected.float()).abs().max()) < _TOLERANCE:
                    return padded
            except RuntimeError as error:
                log.info("no fused attention", head_size=padded, error=str(error).splitlines()[0])
        log.warning("attention of towers has no fused kernel here and is slow", head_size=size)
        return None


def _calls(lengths: Sequence[int]) -> list[tuple[slice, Sequence[int]]]:
    """Rows and segments of each call of the attention kernel."""
    parts = [
        lengths[start : start + _MOST_SEGMENTS] for start in range(0, len(lengths), _MOST_SEGMENTS)
    ]
    ends = accumulate(map(sum, parts), initial=0)
    return [(slice(*some), part) for some, part in zip(pairwise(ends), parts, strict=True)]


def _with_signs(rotation: Rotation) -> Rotation:
    """As plain torch has it."""
    first, second = rotation.sin.chunk(2, dim=-1)
    return Rotation(rotation.cos, torch.cat([-first, second], dim=-1))


@lru_cache(maxsize=4)
def _pixel_line(scaling: PixelScaling, device: torch.device) -> tuple[Tensor, Tensor]:
    """Factor and offset [channels, 1] that make values of bytes."""
    mean, deviation = torch.tensor(scaling.mean), torch.tensor(scaling.deviation)
    factor, offset = scaling.factor / deviation, -mean / deviation
    return factor[:, None].to(device), offset[:, None].to(device)
