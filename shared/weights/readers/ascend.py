"""The codes of msmodelslim."""

import math

import torch
from torch import Tensor

from shared.weights.layouts.ascend import AscendLayout
from shared.weights.layouts.layout import NOT_FINITE, BadCodes
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.layout import ALL, Tensors, together

_ROWS = 1 << 12  # of a weight that are added up at once


class Ascend(AscendLayout):
    """See `Reader`."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Reader.read`."""
        if self.codes.has_narrow_codes(tensors.name("weight")):
            return _narrow(tensors, rows, self.codes.two_a_byte)
        stored = tensors.part("weight", rows, ALL).contiguous()
        codes = stored.view(torch.uint8) ^ 128
        activations = 8 if self.codes.has_whole_activations(tensors.name("weight")) else 16
        if tensors.has("deq_scale"):
            step, zero = _one(tensors, "input_scale"), _zero(tensors)
            scales = _steps(tensors)[rows, None] / step
            return QuantizedWeight(codes, scales, 8, 0, activations=8, fixed=(step, zero))
        scales = _finite(tensors, "weight_scale", rows)
        group = inputs // scales.shape[1] if scales.shape[1] > 1 else 0
        return QuantizedWeight(
            codes, scales, 8, group, _zeros(tensors, rows, scales), activations=activations
        )

    def bias(self, tensors: Tensors) -> Tensor | None:
        """float32 [out]: what `quant_bias` adds, which holds the layer's own bias and takes away what the activations'
        zero has added; None for a layer without one, and where nothing is left."""
        if not tensors.has("quant_bias"):
            return None
        whole = tensors.whole("quant_bias").double()
        if zero := _zero(tensors):
            for first in range(0, len(whole), _ROWS):
                some = slice(first, min(first + _ROWS, len(whole)))
                whole[some] += zero * tensors.part("weight", some, ALL).sum(1, dtype=torch.int64)
        return (whole * _steps(tensors)).float() if bool(whole.any()) else None


def _narrow(tensors: Tensors, rows: slice, two_a_byte: bool) -> QuantizedWeight:
    """Codes of 4 bits. Activations have 16: no operator of A2 and A3 is documented to take 4 bits and 8."""
    codes = _halves(tensors, rows) if two_a_byte else tensors.part("weight", rows, ALL)
    if bool(((codes < -8) | (codes > 7)).any()):
        raise BadCodes("weight", "it has an element that is none of 4 bits, -8 to 7")
    scales = _finite(tensors, "weight_scale", rows).float()
    for name in ("weight_offset", "weight_offset_second"):
        if tensors.has(name) and bool(tensors.whole(name).any()):
            raise BadCodes(name, "it is not 0, and codes of 4 bits have their zero in the middle")
    if tensors.has("weight_scale_second"):
        scales = scales * _finite(tensors, "weight_scale_second", rows).float()
    groups = scales.shape[1]
    group = codes.shape[1] // groups if groups > 1 else 0
    return QuantizedWeight(together((codes + 8).view(torch.uint8), 4), scales, 4, group)


def _halves(tensors: Tensors, rows: slice) -> Tensor:
    """int8 [outputs, inputs] of bytes [outputs / 2, inputs], the output before in the lower half."""
    first = rows.start // 2
    stored = tensors.part("weight", slice(first, -(-rows.stop // 2)), ALL)
    both = torch.stack((stored << 4 >> 4, stored >> 4), 1).flatten(0, 1)
    return both[rows.start - 2 * first : rows.stop - 2 * first]


def _finite(tensors: Tensors, name: str, rows: slice) -> Tensor:
    found = _matrix(tensors, name, rows)
    if not found.isfinite().all():
        raise BadCodes(name, NOT_FINITE)
    return found


def _steps(tensors: Tensors) -> Tensor:
    """float32 [out] of `deq_scale`."""
    stored = tensors.whole("deq_scale")
    if stored.dtype == torch.int64:  # the operator wants the bits of a float in one
        stored = stored.to(torch.int32).view(torch.float32)
    if not stored.isfinite().all():
        raise BadCodes("deq_scale", NOT_FINITE)
    return stored


def _one(tensors: Tensors, name: str) -> float:
    if not tensors.has(name):
        raise BadCodes(name, "the checkpoint lacks it")
    found = float(tensors.whole(name).float().item())
    if name == "input_scale" and not 0 < found < math.inf:
        raise BadCodes(name, f"it is {found}, and no step of activations")
    return found


def _zero(tensors: Tensors) -> int:
    """Of activations."""
    found = _one(tensors, "input_offset") if tensors.has("input_offset") else 0.0
    if not abs(found) <= 128 or found != round(found):
        raise BadCodes("input_offset", f"it is {found}, and no whole number of 8 bits")
    return int(found)


def _matrix(tensors: Tensors, name: str, rows: slice) -> Tensor:
    """[outputs, groups]."""
    if not tensors.has(name):
        raise BadCodes(name, "the checkpoint lacks it")
    return tensors.whole(name)[rows].reshape(rows.stop - rows.start, -1)


def _zeros(tensors: Tensors, rows: slice, scales: Tensor) -> Tensor | None:
    """uint8 [outputs, groups], or None where all are in the middle: numbers are (weight - offset) * scale."""
    if not tensors.has("weight_offset"):
        return None
    stored = _matrix(tensors, "weight_offset", rows).float()
    if not stored.any():
        return None
    if stored.shape != scales.shape or bool(
        ((stored != stored.round()) | (stored.abs() > 127)).any()
    ):
        raise BadCodes("weight_offset", "it is no whole number of 8 bits for each scale")
    return (stored + 128).to(torch.uint8)
