"""Linear layers whose weights stay codes in the device's memory: how they lie there, and their products by torch alone,
which are those of the kernels too (`kernels/linear.py`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.steps.attention_meta import Packed
from shared.weights.linear_weight import Codes
from shared.weights.quantized_weight import Numbers, QuantizedWeight

_PACKED_AT_ONCE = 1 << 24  # codes that are made ready at once
# Numbers that are made of codes at once, for a product with many rows.
_NUMBERS_AT_ONCE = 1 << 26
_WIDEST_HALF = 64  # columns
_NARROWEST = 16  # columns that a tensor core multiplies at once
# Of `torch._int_mm`: it takes more rows than these, and whole eights of inputs and outputs.
_FEW_ROWS = 16
_EIGHT = 8


class Form(IntEnum):
    """What makes a number of a code; see `QuantizedWeight`."""

    PLAIN = 0
    ZEROS = 1
    MINIMA = 2
    TABLE = 3


@dataclass(frozen=True)
class CodedLinear(Packed):
    """`weight` [outputs, bytes]. Of 8 bits: int8 [outputs, columns], codes less 128. Of 4 bits: uint8, two columns in a
    byte: byte i of each run of `half` bytes has column i of a run of 2 * `half` columns in its lower half, and column
    i + `half` in its upper one; the last run is filled up.

    `scales` and, where the form has them, `second` are [groups, outputs] in float32, but for a codebook's numbers [2 **
    bits]. Where scales have 16 bits, zeros and minima are `paired` with them: `scales` are int32, with a scale in the
    lower half and the other in the upper one, both of the type `paired`, as kernels prefetch nothing that is smaller.
    `order`: which input each column belongs to.
    """

    bits: int
    group: int  # columns that share a scale; all of them where an output has one
    columns: int
    half: int
    scales: Tensor
    form: Form
    second: Tensor | None  # zeros or minima that are not paired with scales, or the table
    paired: torch.dtype | None
    order: Tensor | None
    activations: int

    @property
    def outputs(self) -> int:
        """Of the layer."""
        return self.weight.shape[0]

    @property
    def kind(self) -> tuple[object, ...]:
        """What kernels are made for."""
        group = self.group if self.group < self.columns else 0
        return (self.bits, self.run, group, self.form, self.paired)

    @property
    def run(self) -> int:
        """Columns of which each has the scale of the others and which tensor cores multiply at once; 0 where groups are
        no multiple of these."""
        return next((n for n in (128, 64, 32, _NARROWEST) if self._runs_of(n)), 0)

    def _runs_of(self, count: int) -> bool:
        if self.bits == 4 and count != self.half:
            return False
        return self.group >= self.columns or self.group % count == 0

    @property
    def is_whole(self) -> bool:
        """Whether whole numbers of 8 bits are to be multiplied with its codes."""
        plain = self.form is Form.PLAIN
        fits = self.columns % _EIGHT == 0 and self.outputs % _EIGHT == 0
        return (
            self.activations == 8
            and self.bits == 8
            and self.group >= self.columns
            and plain
            and fits
        )

    @property
    def num_bytes(self) -> int:
        """On the device."""
        parts = (self.weight, self.bias, self.scales, self.second, self.order)
        return sum(part.nbytes for part in parts if part is not None)


def pack(
    codes: Codes, out: int, bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> CodedLinear:
    """A few outputs at a time; dtype: of what it is multiplied with. The bias [out] is not kept."""
    whole: Tensor | None = None
    scales: list[Tensor] = []
    seconds: list[Tensor] = []
    for rows in _parts(codes, out):
        part = codes(rows).without_factors()
        placed = _placed(part.codes.to(device), part)
        if whole is None:
            whole = placed.new_empty((out, placed.shape[1]))
        whole[int(rows[0]) : int(rows[0]) + len(rows)] = placed
        scales.append(part.scales.to(device))
        second = part.zeros if part.minima is None else part.minima
        if second is not None:
            seconds.append(second.to(device))
    assert whole is not None
    words, second, paired = _arranged(torch.cat(scales), torch.cat(seconds) if seconds else None)
    form = Form.PLAIN if second is None and paired is None else Form.ZEROS
    if part.minima is not None:
        form = Form.MINIMA
    if part.codebook is not None:
        form = Form.TABLE
        second = torch.tensor(part.codebook, dtype=torch.float32, device=device)
    return CodedLinear(
        weight=whole,
        bias=None if bias is None else bias.to(device, dtype, copy=True),
        bits=part.bits,
        group=part.group or max(1, part.columns),
        columns=part.columns,
        half=_half(part),
        scales=words,
        form=form,
        second=second,
        paired=paired,
        order=None if part.order is None else part.order.to(device),
        activations=part.activations,
    )


def _arranged(
    scales: Tensor, second: Tensor | None
) -> tuple[Tensor, Tensor | None, torch.dtype | None]:
    """`scales`, `second` and `paired` of a CodedLinear, of [outputs, groups]."""
    if second is None:
        return scales.T.float().contiguous(), None, None
    if scales.element_size() != 2:
        return scales.T.float().contiguous(), second.T.float().contiguous(), None
    both = torch.stack((scales.T, second.T.to(scales.dtype)), -1)
    return both.contiguous().view(torch.int32)[..., 0], None, scales.dtype


def _apart(packed: CodedLinear, rows: slice) -> tuple[Tensor, Tensor | None]:
    """Scales, and zeros or minima where there are any, [groups, outputs] in float32, of some outputs."""
    scales = packed.scales[:, rows]
    if packed.paired is None:
        second = None if packed.form is Form.TABLE else packed.second
        return scales, None if second is None else second[:, rows]
    both = scales.contiguous().view(packed.paired).unflatten(1, (-1, 2)).float()
    return both[..., 0], both[..., 1]


def _parts(codes: Codes, out: int) -> Iterator[Numbers]:
    """Outputs that are read at once."""
    columns = codes(np.arange(min(1, out))).columns
    each = max(1, _PACKED_AT_ONCE // max(1, columns))
    for first in range(0, out, each):
        yield np.arange(first, min(first + each, out))


def _half(part: QuantizedWeight) -> int:
    """As many columns as share a scale, up to the widest."""
    if not part.group or part.group >= part.columns:
        return _WIDEST_HALF
    half = _WIDEST_HALF
    while half > _NARROWEST and part.group % half:
        half //= 2
    return half


def _placed(codes: Tensor, part: QuantizedWeight) -> Tensor:
    """`CodedLinear.weight` of codes as `QuantizedWeight` has them."""
    if part.bits == 8:
        return (codes.contiguous() ^ 128).view(torch.int8)
    half = _half(part)
    single = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    single = F.pad(single, (0, -single.shape[1] % (2 * half)))
    lower, upper = single.view(len(single), -1, 2, half).unbind(2)
    return (lower | upper << 4).flatten(1)


# Numbers [outputs, columns] of some outputs of a layer, in a type.
MakeNumbers = Callable[[CodedLinear, slice, torch.dtype], Tensor]


def numbers(packed: CodedLinear, rows: slice, dtype: torch.dtype) -> Tensor:
    """See `MakeNumbers`; each operation is rounded to float32, as `QuantizedWeight` says."""
    values = _single(packed, rows)
    scales, second = (_each_column(part, packed) for part in _apart(packed, rows))
    assert scales is not None
    if packed.form is Form.TABLE:
        assert packed.second is not None
        return packed.second[values.long()].mul_(scales).to(dtype)
    values = values.float()
    if second is None:
        found = values.sub_(1 << (packed.bits - 1)).mul_(scales)
    elif packed.form is Form.MINIMA:
        found = values.mul_(scales).add_(second)
    else:
        found = values.sub_(second).mul_(scales)
    return found.to(dtype)


def _single(packed: CodedLinear, rows: slice) -> Tensor:
    """Codes [outputs, columns] from 0 on, one in each element."""
    stored = packed.weight[rows]
    if packed.bits == 8:
        return stored.view(torch.uint8) ^ 128
    stored = stored.view(len(stored), -1, packed.half)
    return torch.stack((stored & 15, stored >> 4), 2).flatten(1)[:, : packed.columns]


def _each_column(values: Tensor | None, packed: CodedLinear) -> Tensor | None:
    """[outputs, columns] of [groups, outputs]; one column where all have the same."""
    if values is None or len(values) == 1:
        return None if values is None else values.T
    return values.T.repeat_interleave(packed.group, 1)[:, : packed.columns]


def product(x: Tensor, packed: CodedLinear, make_numbers: MakeNumbers = numbers) -> Tensor:
    """x [rows, columns], in the order of the columns, to [rows, outputs]: as that of a layer of numbers in the type of
    x, which are made of a part of the outputs at a time."""
    if packed.is_whole and len(x) > _FEW_ROWS:
        return whole_product(x, packed)
    each = max(1, _NUMBERS_AT_ONCE // max(1, packed.columns))
    found = []
    for first in range(0, packed.outputs, each):
        rows = slice(first, min(first + each, packed.outputs))
        bias = None if packed.bias is None else packed.bias[rows]
        found.append(F.linear(x, make_numbers(packed, rows, x.dtype), bias))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def whole_product(x: Tensor, packed: CodedLinear) -> Tensor:
    """Each row of x becomes whole numbers of 8 bits times a scale, to nearest, the largest at 127."""
    steps = x.float().abs().amax(1, keepdim=True) / 127
    inverse = torch.where(steps == 0, 0.0, 1 / steps)
    rows = (x.float() * inverse).round_().to(torch.int8)
    sums = torch._int_mm(rows, packed.weight.T).float()
    found = sums.mul_(steps).mul_(packed.scales)
    return (found if packed.bias is None else found.add_(packed.bias)).to(x.dtype)
