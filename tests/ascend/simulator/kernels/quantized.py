"""Quantized activations and matrices."""

import torch
from torch import Tensor

from tests.ascend.simulator.dispatch import kernel
from tests.ascend.simulator.errors import Refused, require
from tests.ascend.simulator.kernels.layer import require_contiguous
from tests.ascend.simulator.personality import personality

_LARGEST_INNER = 65535
# torch_npu takes a dtype as torch's number of it; it numbers its own from 256 on.
_DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
}
_QINT8 = 12
_WORD = 8  # codes of 4 bits


def _dtype(name: str, number: int | None, otherwise: torch.dtype) -> torch.dtype:
    if number is None:
        return otherwise
    if number not in _DTYPES:
        raise Refused(f"{name}: output dtype {number} is not simulated")
    return _DTYPES[number]


@kernel("npu", "npu_dynamic_quant")
def dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    name = "npu_dynamic_quant"
    require(input.dtype in (torch.float16, torch.bfloat16), f"{name}: {input.dtype}")
    require(input.dim() > 1, f"{name}: shape {list(input.shape)}")
    require(group_index is None and quant_mode == "pertoken", f"{name}: not simulated")
    require(_dtype(name, dst_type, torch.int8) == torch.int8, f"{name}: not simulated")
    x = input.float()
    if smooth_scales is not None:
        require(
            smooth_scales.dtype == input.dtype, f"{name}: smooth_scales of {smooth_scales.dtype}"
        )
        require(
            list(smooth_scales.shape) == [input.shape[-1]],
            f"{name}: smooth_scales {list(smooth_scales.shape)}",
        )
        x = x * smooth_scales.float()
    scale = x.abs().amax(-1) / 127
    quotient = x / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return quotient.round().clamp(-128, 127).to(torch.int8), scale


@kernel("npu", "npu_quantize")
def quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    name = "npu_quantize"
    kinds = (torch.float16, torch.float32, torch.bfloat16)
    require(input.dtype in kinds, f"{name}: {input.dtype}")
    require(dtype in (_QINT8, 1), f"{name}: output dtype {dtype} is not simulated")
    is_310p = personality().is_310p
    if div_mode:
        known = (torch.float32,) if is_310p else (torch.float32, torch.bfloat16)
        require(scales.dtype in known, f"{name}: scales of {scales.dtype}")
        if zero_points is not None:
            taken = [torch.int8, torch.uint8, torch.int32]
            taken += [] if is_310p else [torch.bfloat16]
            require(zero_points.dtype in taken, f"{name}: zero_points of {zero_points.dtype}")
    require(
        scales.dim() == 1 and len(scales) in (1, input.shape[axis]),
        f"{name}: scales {list(scales.shape)} for axis {axis} of {list(input.shape)}",
    )
    require(
        zero_points is None or zero_points.shape == scales.shape,
        f"{name}: zero_points for scales {list(scales.shape)}",
    )
    shape = [1] * input.dim()
    shape[axis] = -1
    factor = scales.float().view(shape)
    result = input.float() / factor if div_mode else input.float() * factor
    if zero_points is not None:
        result = result + zero_points.float().view(shape)
    return result.round().clamp(-128, 127).to(torch.int8)


@kernel("npu", "npu_quant_matmul")
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    name = "npu_quant_matmul"
    kind = _dtype(name, output_dtype, torch.int8)
    _check_quant_matmul(name, x1, x2, scale, pertoken_scale, kind)
    _check_bias(name, bias, x2.shape[-1], pertoken_scale, kind)
    others = (offset, x1_dtype, x2_dtype, pertoken_scale_dtype, scale_dtype, group_sizes, y_scale)
    require(all(other is None for other in others), f"{name}: not simulated")
    # Products of int8 are exact in float64, as in the device's int32.
    sums = torch.matmul(x1.double(), x2.double())
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias.double()
    result = sums.float() * _floats(scale)
    if pertoken_scale is not None:
        result = result * pertoken_scale[..., None]
    if bias is not None and bias.dtype != torch.int32:
        result = result + bias.float()
    return result.round().clamp(-128, 127).to(kind) if kind == torch.int8 else result.to(kind)


_MARK = 1 << 46
_UPPER = 0xFFFFE000  # the bits of a float32 that are left


@kernel("npu", "npu_trans_quant_param")
def trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int = 0) -> Tensor:
    """Upper bits of float32 in the lower half of int64."""
    name = "npu_trans_quant_param"
    require(offset is None and round_mode == 0, f"{name}: not simulated")
    require(scale.dtype == torch.float32 and scale.dim() in (1, 2), f"{name}: {scale.dtype}")
    require(scale.numel() > 0, f"{name}: empty")
    require_contiguous(name, scale=scale)
    return (scale.view(torch.int32).long() & _UPPER) | _MARK


def _floats(scale: Tensor) -> Tensor:
    if scale.dtype != torch.int64:
        return scale.float()
    require(bool((scale & _MARK).all()), "npu_quant_matmul: a scale that is not made for it")
    bits = scale & _UPPER
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _check_quant_matmul(
    name: str, x1: Tensor, x2: Tensor, scale: Tensor, pertoken: Tensor | None, kind: torch.dtype
) -> None:
    require(
        x1.dtype == x2.dtype == torch.int8,
        f"{name}: {x1.dtype} and {x2.dtype}, only int8 is simulated",
    )
    require(x1.numel() > 0 and x2.numel() > 0, f"{name}: empty")
    require_contiguous(name, x1=x1)
    is_plain = x2.is_contiguous() or x2.mT.is_contiguous()
    require(is_plain, f"{name}: strides of x2 {list(x2.stride())}")
    require(
        max(x1.shape[-1], x2.shape[-1]) <= _LARGEST_INNER,
        f"{name}: {list(x1.shape)} x {list(x2.shape)}",
    )
    require(
        scale.dim() == 1 and len(scale) in (1, x2.shape[-1]), f"{name}: scale {list(scale.shape)}"
    )
    scales = [torch.float32]
    if kind == torch.bfloat16:
        scales.append(torch.bfloat16)
    elif pertoken is None:
        scales.append(torch.int64)  # as npu_trans_quant_param gives it
    require(scale.dtype in scales, f"{name}: scale of {scale.dtype} for an output of {kind}")
    if personality().is_310p:
        require(pertoken is None, f"{name}: 310P has no pertoken_scale")
        require(kind in (torch.int8, torch.float16), f"{name}: output {kind}")
    if pertoken is not None:
        require(pertoken.dtype == torch.float32, f"{name}: pertoken_scale of {pertoken.dtype}")
        require(
            list(pertoken.shape) == [x1.shape[-2]], f"{name}: pertoken_scale {list(pertoken.shape)}"
        )
        require(
            kind in (torch.float16, torch.bfloat16), f"{name}: output {kind} with pertoken_scale"
        )


def _check_bias(
    name: str, bias: Tensor | None, outer: int, pertoken: Tensor | None, kind: torch.dtype
) -> None:
    """By the tables of what goes with what."""
    if bias is None:
        return
    require(list(bias.shape) == [outer], f"{name}: bias {list(bias.shape)}")
    floats = kind == torch.bfloat16 or pertoken is not None
    kinds = (torch.int32, torch.bfloat16, torch.float32) if floats else (torch.int32,)
    require(bias.dtype in kinds, f"{name}: bias {bias.dtype} for an output of {kind}")


@kernel("npu", "npu_convert_weight_to_int4pack")
def convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """Eight codes in a word, the first one lowest."""
    name = "npu_convert_weight_to_int4pack"
    require(not personality().is_310p, f"{name}: not on 310P")
    require(weight.dtype == torch.int32 and weight.dim() == 2, f"{name}: {weight.dtype}")
    require_contiguous(name, weight=weight)
    require(weight.shape[-1] % _WORD == 0, f"{name}: {list(weight.shape)} does not fill words")
    require(
        not weight.numel() or -8 <= int(weight.min()) <= int(weight.max()) <= 7,
        f"{name}: a code that is not of 4 bits",
    )
    places = torch.arange(_WORD) * 4
    words = ((weight & 15).unflatten(-1, (-1, _WORD)).long() << places).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _unpacked(words: Tensor) -> Tensor:
    """Codes of rows of words, from -8 on."""
    codes = (words.long()[..., None] >> torch.arange(_WORD) * 4) & 15
    return torch.where(codes > 7, codes - 16, codes).flatten(-2).to(torch.int8)


@kernel("npu", "npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    name = "npu_weight_quant_batchmatmul"
    others = (quant_scale, quant_offset, weight_dtype)
    require(all(other is None for other in others), f"{name}: not simulated")
    require(inner_precise == 0, f"{name}: inner_precise {inner_precise} of a weight in rows")
    kinds = (torch.float16,) if personality().is_310p else (torch.float16, torch.bfloat16)
    require(x.dtype in kinds and x.dim() == 2, f"{name}: {x.dtype} {list(x.shape)}")
    require(all(tensor.numel() for tensor in (x, weight, antiquant_scale)), f"{name}: empty")
    codes = _weight_codes(name, weight)
    inner, outer = codes.shape
    require(inner == x.shape[1], f"{name}: {list(x.shape)} x {list(codes.shape)}")
    require(max(inner, outer) <= _LARGEST_INNER, f"{name}: {list(codes.shape)}")
    scale = _group_factors(name, antiquant_scale, x.dtype, inner, outer, antiquant_group_size)
    wide = codes.float()
    if antiquant_offset is not None:
        require(
            antiquant_offset.shape == antiquant_scale.shape,
            f"{name}: offset {list(antiquant_offset.shape)}, scale {list(antiquant_scale.shape)}",
        )
        wide = wide + _group_factors(
            name, antiquant_offset, x.dtype, inner, outer, antiquant_group_size
        )
    if bias is not None:
        kind = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        require(bias.dtype == kind, f"{name}: bias {bias.dtype} for x of {x.dtype}")
        require(list(bias.shape) in ([outer], [1, outer]), f"{name}: bias {list(bias.shape)}")
        require_contiguous(name, bias=bias)
    result = x.float() @ (wide * scale)
    return (result if bias is None else result + bias.float()).to(x.dtype)


def _weight_codes(name: str, weight: Tensor) -> Tensor:
    """[inputs, outputs] of a weight in rows, or of the transposed view of one."""
    require(weight.dim() == 2, f"{name}: a weight {list(weight.shape)}")
    is_view = not weight.is_contiguous()
    rows = weight.T if is_view else weight
    require(rows.is_contiguous(), f"{name}: strides of a weight {list(weight.stride())}")
    if weight.dtype == torch.int32:
        require(not personality().is_310p, f"{name}: 310P has no weights of 4 bits")
        rows = _unpacked(rows)
    else:
        require(weight.dtype == torch.int8, f"{name}: a weight of {weight.dtype}")
    return rows.T if is_view else rows


def _group_factors(
    name: str, factors: Tensor, kind: torch.dtype, inner: int, outer: int, group: int
) -> Tensor:
    """Of each element of the weight, or of each of its columns."""
    require(factors.dtype == kind, f"{name}: antiquant {factors.dtype} for x of {kind}")
    if not group:
        shapes = ([1], [1, 1], [outer], [1, outer])
        require(list(factors.shape) in shapes, f"{name}: antiquant {list(factors.shape)}")
        return factors.float().view(1, -1)
    require(not personality().is_310p, f"{name}: 310P has no groups")
    require(group % 32 == 0 and 32 <= group < inner, f"{name}: groups of {group}")
    require(
        list(factors.shape) == [-(-inner // group), outer],
        f"{name}: antiquant {list(factors.shape)}",
    )
    return factors.float().repeat_interleave(group, 0)[:inner]
