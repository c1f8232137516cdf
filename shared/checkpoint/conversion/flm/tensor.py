"""A tensor of a `.flm`, and its values."""

from dataclasses import dataclass
from enum import IntEnum
from math import prod

import torch

from shared.errors import InvalidRequest

# Values at a time: what is made of codes takes many times their memory.
BLOCK = 1 << 24


class TensorKind(IntEnum):
    """How elements are stored, by FastLLM's numbers."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 3
    INT4 = 4
    FLOAT16 = 7
    INT4_NO_ZERO = 8
    INT4_GROUP = 9

    @property
    def bits(self) -> int:
        """Of one element."""
        return {0: 32, 1: 16, 3: 8, 7: 16}.get(self, 4)

    @property
    def is_quantized(self) -> bool:
        """Whether ranges go before the elements."""
        return self not in _FLOATS


_FLOATS = {
    TensorKind.FLOAT32: torch.float32,
    TensorKind.BFLOAT16: torch.bfloat16,
    TensorKind.FLOAT16: torch.float16,
}


@dataclass(frozen=True, slots=True)
class FlmTensor:
    """`ranges`: (min, max) in float32 of each channel along `axis` (-1: of the whole tensor), with INT4_GROUP of each
    `group_width` elements of a row. `data`: elements; of 4 bits two a byte, the first in the upper half.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    axis: int
    group_width: int
    ranges: memoryview
    data: memoryview

    @property
    def elements(self) -> int:
        """How many."""
        return prod(self.shape)

    def require_ranges(self) -> None:
        """Raises InvalidRequest unless each range is one of finite numbers, the lower first."""
        if self.kind.is_quantized:
            low, high = self._ranges()
            if not (torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all():
                raise InvalidRequest("BAD_FLM", f"tensor {self.name!r} has a range that is none")

    def to(self, dtype: torch.dtype, block: int = BLOCK) -> torch.Tensor:
        """The values, made of about `block` elements at a time.

        Raises InvalidRequest if one is finite here and not in `dtype`.
        """
        whole = torch.empty(self.shape, dtype=dtype)
        rows = self.shape[0]
        step = max(1, block * rows // self.elements)
        # Two rows, so that a block of 4-bit codes begins with a byte.
        step += step % 2
        for begin in range(0, rows, step):
            end = min(rows, begin + step)
            values = self._values(begin, end)
            whole[begin:end] = values.to(dtype)
            if not torch.equal(torch.isfinite(values), torch.isfinite(whole[begin:end])):
                raise InvalidRequest(
                    "OVERFLOW",
                    f"tensor {self.name!r} has values that {dtype} has not: --dtype bfloat16",
                )
        return whole

    def codes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a quantized matrix along axis 0: uint8 [out, inputs], float32 scales [out, groups] and uint8 zeros alike;
        a value is its code less the zero, times the scale."""
        out = self.shape[0]
        scales, zeros = (
            values.reshape(out, -1).contiguous()
            for values in scale_and_zero(self.kind, *self._ranges())
        )
        return self._codes(self.data, self.elements).reshape(self.shape), scales, zeros.byte()

    def _codes(self, data: memoryview, count: int) -> torch.Tensor:
        codes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if self.kind.bits == 4:
            codes = torch.stack((codes >> 4, codes & 15), dim=1).reshape(-1)[:count]
        return codes

    def _values(self, begin: int, end: int) -> torch.Tensor:
        """Rows of the tensor along its first axis, in the type they are stored in, or float32."""
        size = self.elements // self.shape[0]
        part = self.data[begin * size * self.kind.bits // 8 :]
        part = part[: -(-(end - begin) * size * self.kind.bits // 8)]
        shape = (end - begin, *self.shape[1:])
        if self.kind in _FLOATS:
            raw = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            return raw.view(_FLOATS[self.kind]).reshape(shape)
        codes = self._codes(part, prod(shape))
        known = scale_and_zero(self.kind, *self._ranges())
        scale, zero = (self._along(values, begin, end) for values in known)
        return codes.reshape(shape).to(torch.float32).sub_(zero).mul_(scale)

    def _along(self, values: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """What `values` of the channels are at each element of the rows, in a shape that is broadcast."""
        if self.kind == TensorKind.INT4_GROUP:
            by_group = values.reshape(self.shape[0], -1)[begin:end]
            return by_group.repeat_interleave(self.group_width, dim=1)[:, : self.shape[1]]
        if self.axis == -1:
            return values
        if self.axis == 0:
            values = values[begin:end]
        return values.reshape([-1 if axis == self.axis else 1 for axis in range(len(self.shape))])

    def _ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = torch.frombuffer(bytearray(self.ranges), dtype=torch.float32).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]


def scale_and_zero(
    kind: TensorKind, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ranges, which are made to include 0: a value is its code less that of 0, times the scale.

    Source: `LowBitConfig` of FastLLM. Ranges of INT4_NO_ZERO and INT4_GROUP begin at a multiple of the scale there,
    which is the same.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    most = 255 if kind == TensorKind.INT8 else 15
    scale = (high - low) / most
    ratio = torch.where(scale > 0, -low / scale, 0.0)
    return scale, torch.floor(ratio + 0.5).clamp(0, most)
