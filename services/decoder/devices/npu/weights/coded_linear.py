"""Linear layers whose weights are codes, by operators that take weights of 8 and of 4 bits.

Of `npu_weight_quant_batchmatmul` the numbers are (code + offset) * scale, with codes from -128 or -8 on, and
activations stay what they are; `npu_quant_matmul` multiplies whole numbers of 8 bits, which `npu_dynamic_quant` makes
of each row of activations, or `npu_quantize` with the step and the zero of a checkpoint: then a bias in whole numbers,
which takes away what the zero adds, is a part of the sums. Limits are those of op-plugin's documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.npu.forms import Coded, Form
from services.decoder.devices.npu.schemas import supports
from services.decoder.steps.attention_meta import Packed
from shared.weights.linear_weight import Codes
from shared.weights.quantized_weight import Numbers, QuantizedWeight

# A weight [inputs, outputs] in rows; the same as a view of [outputs, inputs]; by whole numbers on both sides, whose
# step is that of a row of activations, or of all.
ROWS, VIEW, WHOLE = Form("weight_quant"), Form("weight_quant_t"), Form("quant_matmul")
FIXED = Form("quant_matmul_fixed")
_LARGEST_SIDE = 65_535  # inputs and outputs of one call
_ROUNDING = 64  # outputs of a piece
_GROUPING = 32  # inputs that share a scale are a multiple of these
_WORD = 8  # codes of 4 bits in a word of 32
_MOST_AT_ONCE = 1 << 24  # codes that are made ready at once
_LARGEST_BIAS = 2.0**31 - 128  # the largest of int32 that is a float32


@dataclass(frozen=True)
class Piece:
    """Some outputs. `codes`: int8 [inputs, outputs], or int32 with 8 codes of 4 bits in each along the axis that lies
    in rows; `scales` and `offsets` [groups, outputs] of the model's type; of WHOLE `scales` [outputs] in float32; of
    FIXED those of products, in float32 or as `npu_trans_quant_param` has them, and `bias` int32."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bias: Tensor | None
    group: int

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        parts = (self.codes, self.scales, self.offsets, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True)
class CodedLinear(Packed):
    """`weight` and `bias` are those of the first piece; `order`: which input each column of codes belongs to; `steps`:
    of FIXED the step and the zero of activations, float32 and int32 [inputs]."""

    form: Form
    pieces: tuple[Piece, ...]
    order: Tensor | None
    steps: tuple[Tensor, Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """On the device."""
        order = 0 if self.order is None else self.order.nbytes
        steps = sum(part.nbytes for part in self.steps or ())
        return order + steps + sum(piece.num_bytes for piece in self.pieces)


def problem(part: QuantizedWeight) -> str:
    """Why no operator says what codes say; empty where one may."""
    if part.minima is not None:
        return "its groups have a minimum"
    if part.codebook is not None:
        return "its codes are places in a table"
    if _group(part) % _GROUPING:
        return f"its groups of {part.group} inputs are no multiple of {_GROUPING}"
    if part.columns > _LARGEST_SIDE:
        return f"it has more than {_LARGEST_SIDE} inputs"
    return ""


def asked_for(part: QuantizedWeight, out: int) -> Coded:
    """What a form is sought for, with so many outputs; part: some outputs of the weight."""
    group, has_zeros = _group(part), part.zeros is not None
    whole = part.bits == 8 and not group and not has_zeros
    activations = part.activations if whole else 16
    fixed = activations == 8 and part.fixed is not None
    return Coded(out, part.columns, part.bits, group, has_zeros, activations, fixed)


def forms(asked: Coded, is_310p: bool) -> list[Form]:
    """Every form that such a product may have, those first that are faster, or that others are known to use."""
    found = []
    if asked.fixed and supports("npu_quantize", "div_mode") and supports("npu_trans_quant_param"):
        found = [FIXED] if supports("npu_quant_matmul", "bias") else []
    if asked.activations == 8 and not is_310p and supports("npu_quant_matmul", "pertoken_scale"):
        found.append(WHOLE)
    if not supports("npu_weight_quant_batchmatmul", "antiquant_group_size"):
        return found
    if is_310p:  # whose example in the documents is this one
        return [*found, VIEW] if asked.bits == 8 and not asked.group else []
    if asked.bits == 4 and not supports("npu_convert_weight_to_int4pack"):
        return found
    for form, side in ((ROWS, asked.out), (VIEW, asked.inputs)):
        if asked.bits == 8 or side % _WORD == 0:
            found.append(form)
    return found


def piece_sizes(out: int) -> list[int]:
    """Outputs of each piece of a weight, as few as the operators take."""
    count = -(-out // (_LARGEST_SIDE // _ROUNDING * _ROUNDING))
    each = -(-out // count)
    each += -each % _ROUNDING if count > 1 else 0
    return [min(each, out - first) for first in range(0, out, each)]


def pack(
    codes: Codes,
    sizes: list[int],
    bias: Tensor | None,
    form: Form,
    options: tuple[torch.dtype, torch.device],
) -> CodedLinear:
    """sizes: outputs of each piece; bias: of all of them; options: of what it is multiplied with."""
    pieces, first = [], 0
    order: Tensor | None = None
    for size in sizes:
        own = None if bias is None else bias[first : first + size]
        piece, order = _pack_piece(codes, first, size, own, form, options)
        pieces.append(piece)
        first += size
    steps = _fixed_steps(codes, options[1]) if form == FIXED else None
    return CodedLinear(pieces[0].codes, pieces[0].bias, form, tuple(pieces), order, steps)


def _fixed_steps(codes: Codes, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each input, as the operator wants them."""
    part = codes(np.arange(1))
    assert part.fixed is not None
    step, zero = part.fixed
    of_steps = torch.full((part.columns,), step, dtype=torch.float32)
    return of_steps.to(device), torch.full((part.columns,), zero, dtype=torch.int32).to(device)


def _pack_piece(
    codes: Codes,
    first: int,
    size: int,
    bias: Tensor | None,
    form: Form,
    options: tuple[torch.dtype, torch.device],
) -> tuple[Piece, Tensor | None]:
    dtype, device = options
    whole: Tensor | None = None
    scales: list[Tensor] = []
    offsets: list[Tensor] = []
    sums: list[Tensor] = []
    group, order = 0, None
    fixed: tuple[float, int] | None = None
    for rows in _parts(codes, first, size):
        part = codes(rows).without_factors()
        if whole is None:
            group = _group(part)
            order = None if part.order is None else part.order.to(device)
            whole = _room(size, part, form, device)
            fixed = part.fixed if form == FIXED else None
        signed = _signed(part)
        _fill(whole, int(rows[0]) - first, signed.to(device), part.bits, form)
        if fixed is not None:
            sums.append(signed.sum(1, dtype=torch.int64))
        scales.append(part.scales)
        if part.zeros is not None:
            offsets.append(2 ** (part.bits - 1) - part.zeros.to(dtype))
    assert whole is not None
    if fixed is not None:
        of_products = torch.cat(scales)[:, 0].float() * fixed[0]
        return Piece(
            whole,
            _of_products(of_products.contiguous().to(device), dtype),
            None,
            _whole_bias(bias, torch.cat(sums), of_products, fixed[1]).to(device),
            group,
        ), order
    return Piece(
        whole.T if form == VIEW else whole,
        _scales(torch.cat(scales), form, dtype).to(device),
        torch.cat(offsets).T.contiguous().to(device) if offsets else None,
        None if bias is None else bias.to(device, _bias_dtype(form, dtype)).contiguous(),
        group,
    ), order


def _of_products(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As the operator takes them for results of a type, in graphs too."""
    if dtype == torch.bfloat16:
        return scales
    found: Tensor = torch_npu.npu_trans_quant_param(scales)
    return found


def _whole_bias(bias: Tensor | None, sums: Tensor, scales: Tensor, zero: int) -> Tensor:
    """int32 [outputs]: a bias in steps of products, without what the zero of activations adds: sums of codes times
    that."""
    own = torch.zeros(len(sums), dtype=torch.float64)
    if bias is not None:
        own = torch.where(scales == 0, own, bias.double() / scales.double()).round()
    return (own - zero * sums).clamp(-_LARGEST_BIAS, _LARGEST_BIAS).to(torch.int32)


def _bias_dtype(form: Form, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if form == WHOLE or dtype == torch.bfloat16 else dtype


def _parts(codes: Codes, first: int, size: int) -> Iterator[Numbers]:
    """Outputs that are read at once, as many as fill words where there are as many."""
    columns = codes(np.arange(first, first + 1)).columns
    each = max(_ROUNDING, _MOST_AT_ONCE // max(1, columns) // _ROUNDING * _ROUNDING)
    for start in range(first, first + size, each):
        yield np.arange(start, min(start + each, first + size))


def _group(part: QuantizedWeight) -> int:
    """Inputs that share a scale; 0 for all of an output's."""
    return part.group if part.group < part.columns else 0


def _signed(part: QuantizedWeight) -> Tensor:
    """int8 [outputs, columns] from -128 or -8 on."""
    if part.bits == 8:
        return (part.codes.contiguous() ^ 128).view(torch.int8)
    return part.unpacked().view(torch.int8) - 8


def _scales(scales: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
    if form == WHOLE:
        return scales[:, 0].float().contiguous()
    return scales.T.to(dtype).contiguous()


def _room(size: int, part: QuantizedWeight, form: Form, device: torch.device) -> Tensor:
    sides = (size, part.columns) if form == VIEW else (part.columns, size)
    if part.bits == 8:
        return torch.empty(sides, dtype=torch.int8, device=device)
    return torch.empty((sides[0], sides[1] // _WORD), dtype=torch.int32, device=device)


def _fill(whole: Tensor, first: int, values: Tensor, bits: int, form: Form) -> None:
    """Writes outputs from `first` on; values: int8 [outputs, inputs] on the device."""
    count = len(values)
    if form == VIEW:
        target = whole[first : first + count]
    else:
        values = values.T
        unit = 1 if bits == 8 else _WORD
        target = whole[:, first // unit : (first + count) // unit]
    if bits == 4:
        values = torch_npu.npu_convert_weight_to_int4pack(values.contiguous().to(torch.int32))
    target.copy_(values)


def product(x: Tensor, packed: CodedLinear) -> Tensor:
    """x [rows, inputs] to [rows, outputs]."""
    if not len(x):  # which the operators refuse
        return x.new_empty((0, sum(piece.scales.shape[-1] for piece in packed.pieces)))
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    x = x.contiguous()
    if packed.steps is not None:
        found = _fixed_products(x, packed.pieces, *packed.steps)
    elif packed.form == WHOLE:
        found = _whole_products(x, packed.pieces)
    else:
        found = [_weight_product(x, piece) for piece in packed.pieces]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _weight_product(x: Tensor, piece: Piece) -> Tensor:
    found: Tensor = torch_npu.npu_weight_quant_batchmatmul(
        x,
        piece.codes,
        piece.scales,
        antiquant_offset=piece.offsets,
        bias=piece.bias,
        antiquant_group_size=piece.group,
    )
    return found


def _whole_products(x: Tensor, pieces: tuple[Piece, ...]) -> list[Tensor]:
    """Each row of x becomes whole numbers of 8 bits times a scale, to nearest, the largest at 127."""
    rows, steps = torch_npu.npu_dynamic_quant(x)
    return [
        torch_npu.npu_quant_matmul(
            rows,
            piece.codes,
            piece.scales,
            pertoken_scale=steps,
            bias=piece.bias,
            output_dtype=x.dtype,
        )
        for piece in pieces
    ]


def _fixed_products(
    x: Tensor, pieces: tuple[Piece, ...], steps: Tensor, zeros: Tensor
) -> list[Tensor]:
    """Each element of x becomes a whole number of 8 bits, to nearest, and the last one where it is too large."""
    rows = torch_npu.npu_quantize(x, steps, zeros, torch.qint8, 1, True)
    return [
        torch_npu.npu_quant_matmul(
            rows, piece.codes, piece.scales, bias=piece.bias, output_dtype=x.dtype
        )
        for piece in pieces
    ]
