"""Keys and values as codes of 8 bits, as CANN's fused kernel reads them: a scale for each token and head, which lies in
blocks as the codes do (`key_antiquant_mode` 5).

The kernel knows no numbers beside codes. An element that is too large for the scale of the others (`KVSpec.kept`) has
two digits: element = (low + 128 * high) * scale. Upper digits are elements of their own behind those of the head, which
meet the query's element times 128.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.npu.attention.cache import NpuKV, widened, zeros
from services.decoder.steps.attention_meta import KVSpec

_LARGEST = 127  # of a digit
_BASE = 128
_ROUNDING = 32  # elements: the kernel takes heads of codes of a multiple of these
_SCALE = torch.float32
_MOST_AT_ONCE = 1 << 22  # elements of keys that are float32 at once
_BYTES_AT_ONCE = 24  # of each of these, with what is made of it on the way
_TINY = torch.finfo(_SCALE).tiny


@dataclass(frozen=True)
class UpperDigits:
    """Which elements of each head have two digits, at most `count` of a head.

    `elements` int64 [num_kv, count]: which element the upper digits in turn belong to; `used` [num_kv, count]: 1, or 0
    where a head has fewer. `digits` int64 [num_kv, P]: where in a head's row the upper digit of an element lies;
    `has` [num_kv, P]: 1 for elements that have one, else 0.
    """

    count: int
    elements: Tensor
    used: Tensor
    digits: Tensor
    has: Tensor

    @classmethod
    def of(cls, spec: KVSpec, device: torch.device) -> "UpperDigits | None":
        """None where no element is kept."""
        count, size, width = upper_digits(spec), head_size(spec), coded_width(spec)
        if not count:
            return None
        elements = torch.zeros((spec.num_kv_heads, count), dtype=torch.int64)
        used = torch.zeros((spec.num_kv_heads, count))
        digits = torch.zeros((spec.num_kv_heads, width), dtype=torch.int64)
        has = torch.zeros((spec.num_kv_heads, width))
        for head, kept in enumerate(spec.kept):
            for place, element in enumerate(kept):
                elements[head, place], used[head, place] = element, 1
                digits[head, element], has[head, element] = size + place, 1
        parts = (part.to(device) for part in (elements, used, digits, has))
        return cls(count, *parts)

    def on_host(self) -> "UpperDigits":
        """A copy. Waits for the device."""
        parts = (self.elements, self.used, self.digits, self.has)
        return UpperDigits(self.count, *(part.cpu() for part in parts))

    def of_elements(self, wide: Tensor) -> Tensor:
        """Those that have an upper digit [..., num_kv, count] of rows [..., num_kv, P]; 0 where there is none."""
        return wide.gather(-1, self.elements.expand(*wide.shape[:-1], -1)) * self.used

    def whole(self, codes: Tensor) -> Tensor:
        """Both digits of each element of rows [..., num_kv, P] of codes as float32."""
        high = codes.gather(-1, self.digits.expand_as(codes)) * self.has
        return codes + _BASE * high

    def added_to(self, q: Tensor, size: int) -> Tensor:
        """Queries [T, num_q, D] with what meets upper digits, filled up with zeros to `size` before that."""
        share = q.shape[1] // len(self.elements)
        elements = self.elements.repeat_interleave(share, 0)
        found = q.gather(-1, elements.expand(len(q), -1, -1)) * _BASE
        return torch.cat([widened(q, size), found], -1)


@dataclass(frozen=True)
class CodedKV(NpuKV):
    """`k` and `v` are codes int8; scales of both float32 [blocks, num_kv, block_size]."""

    k_scales: Tensor
    v_scales: Tensor
    size: int  # elements of a head before the upper digits of some
    upper: UpperDigits | None

    @classmethod
    def make(
        cls, spec: KVSpec, num_blocks: int, block_size: int, device: torch.device | None
    ) -> "CodedKV":
        """Zeros; without a device pinned on the host."""
        shape = (num_blocks, block_size, spec.num_kv_heads, coded_width(spec))
        k, v = (zeros(shape, torch.int8, device) for _ in range(2))
        of_scales = (num_blocks, spec.num_kv_heads, block_size)
        k_scales, v_scales = (zeros(of_scales, _SCALE, device) for _ in range(2))
        upper = UpperDigits.of(spec, device or torch.device("cpu"))
        size = head_size(spec)
        return cls(k, v, spec.k_size, spec.v_size, k_scales, v_scales, size, upper)

    def pairs(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Codes and scales."""
        return [(self.k, self.v), (self.k_scales, self.v_scales)]

    def read(self, block: int) -> tuple[Tensor, Tensor]:
        """Copies of a block as bytes [block_size, num_kv, bytes]: of a key its codes, its scale and upper digits, of a
        value its codes and its scale."""
        keys, values = (
            torch.cat([codes[block, ..., :size].view(torch.uint8), _as_bytes(scales[block])], -1)
            for codes, scales, size in (
                (self.k, self.k_scales, self.k_size),
                (self.v, self.v_scales, self.v_size),
            )
        )
        if self.upper is None:
            return keys, values
        digits = self.k[block, ..., self.size : self.size + self.upper.count]
        return torch.cat([keys, digits.view(torch.uint8)], -1), values

    def replace_block(self, block: int, k: Tensor, v: Tensor) -> None:
        """Takes over what `read` gave."""
        for codes, scales, size, given in (
            (self.k, self.k_scales, self.k_size, k.to(self.k.device)),
            (self.v, self.v_scales, self.v_size, v.to(self.v.device)),
        ):
            codes[block, ..., :size] = given[..., :size].contiguous().view(torch.int8)
            stored = given[..., size : size + _SCALE.itemsize].contiguous().view(_SCALE)
            scales[block] = stored[..., 0].T
        if self.upper is not None:
            digits = k.to(self.k.device)[..., self.k_size + _SCALE.itemsize :]
            places = slice(self.size, self.size + self.upper.count)
            self.k[block, ..., places] = digits.contiguous().view(torch.int8)

    def numbers(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values float32 [n, block_size, num_kv, size] of blocks, int64 [n] on the device."""
        return self._keys(blocks)[..., : self.k_size], self._values(blocks)[..., : self.v_size]

    def numbers_as(self, dtype: torch.dtype, blocks: Tensor, width: int) -> NpuKV:
        """The same in a type, as a cache of these blocks with heads of another width."""
        shape = (len(blocks), *self.k.shape[1:3], width)
        k, v = (torch.zeros(shape, dtype=dtype, device=self.k.device) for _ in range(2))
        for first in range(0, len(blocks), each := max(1, _MOST_AT_ONCE // self.k[0].numel())):
            part = slice(first, first + each)
            k[part, ..., : self.k_size], v[part, ..., : self.v_size] = self.numbers(blocks[part])
        return NpuKV(k, v, self.k_size, self.v_size)

    def coded(self, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Keys and values [T, num_kv, D] as codes [T, num_kv, P] and scales [T, num_kv], of both each."""
        width = self.k.shape[-1]
        if self.upper is None:
            key_codes, key_scales = torch_npu.npu_dynamic_quant(widened(k, width))
        else:
            key_codes, key_scales = self._of_two_digits(widened(k, width).float(), self.upper)
        value_codes, value_scales = torch_npu.npu_dynamic_quant(widened(v, width))
        return (key_codes, value_codes), (key_scales, value_scales)

    def widened_queries(self, q: Tensor) -> Tensor:
        """[T, num_q, D] as they meet keys: [T, num_q, P]."""
        wide = q if self.upper is None else self.upper.added_to(q, self.size)
        return widened(wide, self.k.shape[-1])

    def on_host(self) -> "CodedKV":
        """A copy. Waits for the device."""
        parts = (self.k, self.v, self.k_scales, self.v_scales)
        k, v, k_scales, v_scales = (part.cpu() for part in parts)
        upper = None if self.upper is None else self.upper.on_host()
        return CodedKV(k, v, self.k_size, self.v_size, k_scales, v_scales, self.size, upper)

    def places(self, slots: Tensor) -> Tensor:
        """Where in all scales those of slots, int32 [T], lie: int64 [T * num_kv]."""
        num_kv, block_size = self.k_scales.shape[1:]
        heads = torch.arange(num_kv, dtype=torch.int32, device=slots.device) * block_size
        first = slots + slots // block_size * (block_size * (num_kv - 1))
        return (first[:, None] + heads).flatten().long()

    def _keys(self, blocks: Tensor) -> Tensor:
        codes = self.k.index_select(0, blocks).float()
        codes = codes if self.upper is None else self.upper.whole(codes)
        return codes * _of_tokens(self.k_scales.index_select(0, blocks))

    def _values(self, blocks: Tensor) -> Tensor:
        codes = self.v.index_select(0, blocks).float()
        return codes * _of_tokens(self.v_scales.index_select(0, blocks))

    def _of_two_digits(self, wide: Tensor, upper: UpperDigits) -> tuple[Tensor, Tensor]:
        """The scale is that of the other elements, or of upper digits, whichever needs the larger one."""
        others = (wide * (1 - upper.has)).abs().amax(-1) / _LARGEST
        scales = torch.maximum(others, upper.of_elements(wide).abs().amax(-1) / (_LARGEST * _BASE))
        whole = (wide / scales.clamp(min=_TINY)[..., None]).round()
        high = (whole / _BASE).round() * upper.has
        codes = whole - _BASE * high
        codes[..., self.size : self.size + upper.count] = upper.of_elements(high)
        return codes.to(torch.int8), scales


def upper_digits(spec: KVSpec) -> int:
    """Elements of a head that have two digits, of the head that has most of them."""
    return max(map(len, spec.kept), default=0)


def head_size(spec: KVSpec) -> int:
    """Elements of a key or of a value, whichever has more."""
    return max(spec.k_size, spec.v_size)


def coded_width(spec: KVSpec) -> int:
    """Elements of a head of codes, with upper digits and the zeros that it is filled up with."""
    size = head_size(spec) + upper_digits(spec)
    return -(-size // _ROUNDING) * _ROUNDING


def block_bytes(spec: KVSpec, block_size: int) -> int:
    """Of codes and scales, of keys and of values."""
    return 2 * block_size * spec.num_kv_heads * (coded_width(spec) + _SCALE.itemsize)


def numbers_bytes(spec: KVSpec, tokens: int, width: int) -> int:
    """What `CodedKV.numbers_as` takes at most for so many tokens."""
    elements = tokens * spec.num_kv_heads
    way = min(elements * coded_width(spec), _MOST_AT_ONCE) * _BYTES_AT_ONCE
    return 2 * elements * width * spec.dtype.itemsize + way


def _of_tokens(scales: Tensor) -> Tensor:
    """[n, num_kv, block_size] as it meets codes [n, block_size, num_kv, P]."""
    return scales.transpose(1, 2)[..., None]


def _as_bytes(scales: Tensor) -> Tensor:
    """Of a block [num_kv, block_size]: uint8 [block_size, num_kv, 4]."""
    return scales.T.contiguous()[..., None].view(torch.uint8)
