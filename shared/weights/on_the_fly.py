"""Weights that are stored as numbers become codes."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.errors import InvalidRequest
from shared.weights.layouts.layout import NOT_FINITE
from shared.weights.linear_weight import LinearWeight, Places
from shared.weights.quantized_weight import Numbers, QuantizedWeight
from shared.weights.scheme import Scheme

_READ = 1 << 24  # elements that are held in float32 at once
_ROUND = 1 << 17  # elements that stay in a core's caches meanwhile
_LEAST = 1e-30  # a largest element below counts as zero


def quantize(weight: LinearWeight, scheme: Scheme, rows: Places = None) -> QuantizedWeight:
    """Codes of some outputs (rows) to nearest: of 8 bits from -127 to 127 times a scale in float32, with the largest of
    a group at 127; of 4 bits from the least to the largest of a group and zero, with a zero point and a scale in
    bfloat16.

    Raises InvalidRequest, by the weight's name, for one that is not finite or has no form in codes.
    """
    if scheme.bits == 4 and weight.inputs % 2:
        raise _refusal(weight, "codes of 4 bits are kept for an even number of inputs")
    group = scheme.group or weight.inputs
    to_codes = _to_bytes if scheme.bits == 8 else _to_halves
    made: QuantizedWeight | None = None
    places = np.arange(weight.out) if rows is None else rows
    for at, numbers in _read(weight, places):
        part = to_codes(numbers, group)
        if not bool(part.scales.isfinite().all()):
            raise _refusal(weight, f"{NOT_FINITE}; download the model again")
        if made is None:
            made = _room_for(part, len(places))
        for whole, piece in zip(_tensors(made), _tensors(part), strict=True):
            whole[at] = piece
    if made is None:
        raise _refusal(weight, "it has no outputs")
    return replace(made, activations=8) if scheme.digits == 1 else made


def _read(weight: LinearWeight, places: Numbers) -> Iterator[tuple[slice, Tensor]]:
    """Some outputs at a time, in float32."""
    step, each = (max(1, most // max(1, weight.inputs)) for most in (_READ, _ROUND))
    for first in range(0, len(places), step):
        dense = weight.select(places[first : first + step], None, torch.float32)
        for number, rows in enumerate(dense.split(each)):
            start = first + number * each
            yield slice(start, start + len(rows)), rows


def _room_for(part: QuantizedWeight, out: int) -> QuantizedWeight:
    codes, scales, *zeros = (tensor.new_empty((out, tensor.shape[1])) for tensor in _tensors(part))
    return replace(part, codes=codes, scales=scales, zeros=zeros[0] if zeros else None)


def _tensors(part: QuantizedWeight) -> list[Tensor]:
    return [tensor for tensor in (part.codes, part.scales, part.zeros) if tensor is not None]


def _to_bytes(rows: Tensor, group: int) -> QuantizedWeight:
    grouped = _in_groups(rows, group)
    largest = grouped.abs().amax(-1, keepdim=True)
    scales = torch.where(largest < _LEAST, 0.0, largest / 127)
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    codes = (grouped * inverse).round_().add_(128)
    return QuantizedWeight(_codes(codes, rows.shape[1]), scales[..., 0], 8, group)


def _to_halves(rows: Tensor, group: int) -> QuantizedWeight:
    grouped = _in_groups(rows, group)
    least = grouped.amin(-1, keepdim=True).clamp(max=0)
    extent = grouped.amax(-1, keepdim=True).clamp(min=0) - least
    scales = torch.where(extent < _LEAST, 0.0, extent / 15).bfloat16()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    zeros = (least * -inverse).round_().clamp_(0, 15)
    codes = (grouped * inverse).round_().add_(zeros).clamp_(0, 15)
    codes = _codes(codes, rows.shape[1])
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return QuantizedWeight(packed, scales[..., 0], 4, group, zeros[..., 0].to(torch.uint8))


def _in_groups(rows: Tensor, group: int) -> Tensor:
    """[out, groups, group], the last one filled up with zeros, which change neither its scale nor its zero."""
    padded = F.pad(rows, (0, -rows.shape[1] % group))
    return padded.view(len(rows), -1, group)


def _codes(grouped: Tensor, inputs: int) -> Tensor:
    return grouped.flatten(1)[:, :inputs].to(torch.uint8)


def _refusal(weight: LinearWeight, why: str) -> InvalidRequest:
    return InvalidRequest(
        "UNSUPPORTED_WEIGHTS",
        f"{weight.name} [{weight.out} outputs, {weight.inputs} inputs] cannot be quantized: {why}",
        field="model",
    )
