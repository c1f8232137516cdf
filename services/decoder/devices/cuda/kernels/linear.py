"""Products with weights of codes: numbers are made of codes in registers, on their way to the tensor cores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.decoder.devices.cuda.coded_linear import CodedLinear, Form

MOST_ROWS = 64  # beyond, the numbers are made once for all rows
_OUTPUTS, _FEW_OUTPUTS = 64, 32  # of a program, and where that makes few programs
# Programs that a device has at once, about: columns are divided until there are as many.
_PROGRAMS = 264
_OF_LARGE = 1056  # the same, where outputs alone make more than that
_LEAST_STEPS = 4  # runs of columns of a program
_MOST_PARTS = 16
_PAIRED = {None: 0, torch.bfloat16: 1, torch.float16: 2}


def product(x: Tensor, packed: CodedLinear) -> Tensor:
    """x [rows, columns], MOST_ROWS at most, of a layer whose `run` is not 0, to [rows, outputs]."""
    rows, outputs = x.shape[0], packed.outputs
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x.contiguous()
    step = _step(packed)
    steps = triton.cdiv(packed.columns, step)
    is_large = outputs > _PROGRAMS * _OUTPUTS
    is_plain = packed.bits == 8 and packed.form is Form.PLAIN
    each = _FEW_OUTPUTS if is_plain and not is_large and rows <= _FEW_OUTPUTS else _OUTPUTS
    programs = triton.cdiv(outputs, each)
    most = (_OF_LARGE if is_large else _PROGRAMS) // programs
    parts = max(1, min(_MOST_PARTS, most, steps // _LEAST_STEPS))
    sums = (
        torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
        if parts > 1
        else out
    )
    has_bias = packed.bias is not None
    _product[(programs, parts)](
        x,
        packed.weight,
        packed.scales,
        packed.scales if packed.second is None else packed.second,
        packed.bias if has_bias else x,
        sums,
        rows,
        outputs,
        packed.columns,
        packed.weight.shape[1],
        triton.cdiv(steps, parts),
        BITS=packed.bits,
        FORM=packed.form.value,
        PAIRED=_PAIRED[packed.paired],
        GROUP=_group(packed),
        RUN=packed.run,
        HAS_BIAS=has_bias and parts == 1,
        ROWS=max(16, triton.next_power_of_2(rows)),
        OUTPUTS=each,
        num_warps=4,
        num_stages=4,
    )
    if parts > 1:
        size = rows * outputs
        _sum_parts[(triton.cdiv(size, 1024),)](
            sums,
            packed.bias if has_bias else x,
            out,
            size,
            outputs,
            parts,
            HAS_BIAS=has_bias,
            SIZE=1024,
        )
    return out


def numbers(packed: CodedLinear, rows: slice, dtype: torch.dtype) -> Tensor:
    """Of the outputs `rows` [outputs, columns], of a layer whose `run` is not 0."""
    count = rows.stop - rows.start
    out = torch.empty((count, packed.columns), dtype=dtype, device=packed.weight.device)
    if not out.numel():
        return out
    step = _step(packed)
    grid = (triton.cdiv(count, 32), triton.cdiv(packed.columns, step))
    _numbers[grid](
        packed.weight,
        packed.scales,
        packed.scales if packed.second is None else packed.second,
        out,
        rows.start,
        rows.stop,
        packed.outputs,
        packed.columns,
        packed.weight.shape[1],
        BITS=packed.bits,
        FORM=packed.form.value,
        PAIRED=_PAIRED[packed.paired],
        GROUP=_group(packed),
        RUN=packed.run,
        OUTPUTS=32,
        num_warps=4,
    )
    return out


def _group(packed: CodedLinear) -> int:
    """0 where an output has one scale."""
    return packed.group if packed.group < packed.columns else 0


def _step(packed: CodedLinear) -> int:
    """Columns of a step."""
    return packed.run * (8 // packed.bits)


@triton.jit
def _words(
    scales,
    second,
    column,
    columns,
    outputs,
    output,
    valid,
    FORM: tl.constexpr,
    PAIRED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """What lies in memory of the scales of some outputs in the group of a column, and of their zeros or minima."""
    at = tl.minimum(column, columns - 1) // GROUP * outputs if GROUP else 0
    word = tl.load(scales + at + output, mask=valid, other=0)
    if PAIRED == 0 and (FORM == 1 or FORM == 2):
        return word, tl.load(second + at + output, mask=valid, other=0.0)
    return word, word


@triton.jit
def _scaling(word, beside, BITS: tl.constexpr, FORM: tl.constexpr, PAIRED: tl.constexpr):
    """Scales, and zeros or minima, float32 [outputs]; what forms and pairs are: `Form` and `CodedLinear`."""
    if PAIRED == 1:
        scale = (word << 16).to(tl.float32, bitcast=True)
        beside = (word & -65536).to(tl.float32, bitcast=True)
    elif PAIRED == 2:
        scale = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        beside = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = word
        if FORM == 0 or FORM == 3:
            beside = tl.full(word.shape, 1 << (BITS - 1), tl.float32)
    return scale, beside


@triton.jit
def _made(
    codes, word, beside, second, BITS: tl.constexpr, FORM: tl.constexpr, PAIRED: tl.constexpr
):
    """float32 of codes [columns, outputs] from 0 on, of one group."""
    scale, beside = _scaling(word, beside, BITS, FORM, PAIRED)
    scale, beside = scale[None, :], beside[None, :]
    if FORM == 3:
        return tl.load(second + codes.to(tl.int32)) * scale
    value = codes.to(tl.float32)
    if FORM == 2:
        return value * scale + beside
    return (value - beside) * scale


@triton.jit(do_not_specialize=["rows", "steps_of_part"])
def _product(
    x,
    weight,
    scales,
    second,
    bias,
    out,
    rows,
    outputs,
    columns,
    bytes_of_output,
    steps_of_part,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    PAIRED: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """One part of the columns of some outputs: out [parts, rows, outputs]."""
    part = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = output < outputs
    row = tl.arange(0, ROWS)
    there = row < rows
    run = tl.arange(0, RUN)
    own = x + row[:, None].to(tl.int64) * columns
    stored = weight + output[None, :].to(tl.int64) * bytes_of_output
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    kind = x.dtype.element_ty
    first = part * steps_of_part
    STEP: tl.constexpr = RUN * 8 // BITS
    last = tl.minimum(first + steps_of_part, tl.cdiv(columns, STEP))
    word, beside = _words(
        scales, second, first * STEP, columns, outputs, output, valid, FORM, PAIRED, GROUP
    )
    for step in range(first, last):
        byte = step * RUN + run
        codes = tl.load(
            stored + byte[:, None], mask=valid[None, :] & (byte < bytes_of_output)[:, None], other=0
        )
        column = step * STEP + run
        left = tl.load(
            own + column[None, :], mask=there[:, None] & (column < columns)[None, :], other=0.0
        )
        if BITS == 8 and FORM == 0:
            # Codes are multiplied as they are, their sums by the scale. That of the next step is on its way meanwhile.
            if GROUP == 0:
                sums = tl.dot(left, codes.to(kind), sums, input_precision="ieee")
            else:
                scale = word
                word, beside = _words(
                    scales,
                    second,
                    (step + 1) * STEP,
                    columns,
                    outputs,
                    output,
                    valid,
                    FORM,
                    PAIRED,
                    GROUP,
                )
                sums += tl.dot(left, codes.to(kind), input_precision="ieee") * scale[None, :]
        elif BITS == 8:
            word, beside = _words(
                scales, second, step * STEP, columns, outputs, output, valid, FORM, PAIRED, GROUP
            )
            values = _made(codes.to(tl.int32) + 128, word, beside, second, BITS, FORM, PAIRED)
            sums = tl.dot(left, values.to(kind), sums, input_precision="ieee")
        else:
            word, beside = _words(
                scales, second, step * STEP, columns, outputs, output, valid, FORM, PAIRED, GROUP
            )
            values = _made(codes & 15, word, beside, second, BITS, FORM, PAIRED)
            sums = tl.dot(left, values.to(kind), sums, input_precision="ieee")
            column += RUN
            left = tl.load(
                own + column[None, :], mask=there[:, None] & (column < columns)[None, :], other=0.0
            )
            word, beside = _words(
                scales,
                second,
                step * STEP + RUN,
                columns,
                outputs,
                output,
                valid,
                FORM,
                PAIRED,
                GROUP,
            )
            values = _made(codes >> 4, word, beside, second, BITS, FORM, PAIRED)
            sums = tl.dot(left, values.to(kind), sums, input_precision="ieee")
    if BITS == 8 and FORM == 0 and GROUP == 0:
        sums *= tl.load(scales + output, mask=valid, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=valid, other=0.0).to(tl.float32)[None, :]
    place = (part * rows + row)[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=there[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["size", "parts"])
def _sum_parts(sums, bias, out, size, outputs, parts, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):
    """out [rows, outputs] of sums [parts, rows, outputs], in the order of the parts."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    valid = place < size
    found = tl.load(sums + place, mask=valid, other=0.0)
    for _ in range(1, parts):
        sums += size
        found += tl.load(sums + place, mask=valid, other=0.0)
    if HAS_BIAS:
        found += tl.load(bias + place % outputs, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["first", "last"])
def _numbers(
    weight,
    scales,
    second,
    out,
    first,
    last,
    outputs,
    columns,
    bytes_of_output,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    PAIRED: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """out [last - first, columns] of outputs `first` to `last`."""
    output = first + tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = output < last
    run = tl.arange(0, RUN)
    STEP: tl.constexpr = RUN * 8 // BITS
    start = tl.program_id(1) * STEP
    byte = tl.program_id(1) * RUN + run
    codes = tl.load(
        weight + output[None, :].to(tl.int64) * bytes_of_output + byte[:, None],
        mask=valid[None, :] & (byte < bytes_of_output)[:, None],
        other=0,
    )
    target = out + (output - first)[None, :].to(tl.int64) * columns
    kind = out.dtype.element_ty
    column = start + run
    word, beside = _words(
        scales, second, start, columns, outputs, output, valid, FORM, PAIRED, GROUP
    )
    inside = valid[None, :] & (column < columns)[:, None]
    if BITS == 8:
        values = _made(codes.to(tl.int32) + 128, word, beside, second, BITS, FORM, PAIRED)
        tl.store(target + column[:, None], values.to(kind), mask=inside)
    else:
        values = _made(codes & 15, word, beside, second, BITS, FORM, PAIRED)
        tl.store(target + column[:, None], values.to(kind), mask=inside)
        column += RUN
        word, beside = _words(
            scales, second, start + RUN, columns, outputs, output, valid, FORM, PAIRED, GROUP
        )
        values = _made(codes >> 4, word, beside, second, BITS, FORM, PAIRED)
        tl.store(
            target + column[:, None],
            values.to(kind),
            mask=valid[None, :] & (column < columns)[:, None],
        )
