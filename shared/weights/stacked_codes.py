"""The codes of several layers that are computed as one."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shared.weights.quantized_weight import NotAsCodes, QuantizedWeight


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The outputs of several weights of the same inputs, one below the other. Weights that are quantized in different
    ways, as those of one layer of a GGUF file may be, get a form that can say all of them, also those without outputs
    here. Raises NotAsCodes where there is none."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        _require_one_order(first, part)
    if any(_form(part) != _form(first) for part in parts):
        parts = _alike(parts)
        first = parts[0]
    scales = _joined([part.scales for part in parts])
    assert scales is not None
    spans = [part.span for part in parts]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=scales,
        zeros=_joined([part.zeros for part in parts]),
        minima=_joined([part.minima for part in parts]),
        activations=max(part.activations for part in parts),
        fixed=first.fixed if all(part.fixed == first.fixed for part in parts) else None,
        factors=_joined([part.factors for part in parts]),
        minimum_factors=_joined([part.minimum_factors for part in parts]),
        span=(min(least for least, _ in spans), max(most for _, most in spans)),
    )


def require_alike(first: QuantizedWeight, other: QuantizedWeight) -> None:
    """Raises NotAsCodes for outputs of one layer that are not in one form."""
    if _form(first) != _form(other):
        raise NotAsCodes("layers that are computed as one are quantized in different ways")
    _require_one_order(first, other)


def _require_one_order(first: QuantizedWeight, other: QuantizedWeight) -> None:
    orders = [part.order for part in (first, other) if part.order is not None]
    if len(orders) == 1 or (orders and not torch.equal(*orders)):
        raise NotAsCodes("layers that are computed as one have their inputs in different orders")


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(there) if there else None  # of several types the wider one


def _form(part: QuantizedWeight) -> tuple[object, ...]:
    optional = part.zeros, part.minima, part.factors, part.minimum_factors
    return part.bits, part.group, part.codebook, tuple(values is None for values in optional)


def _alike(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """The same numbers, but for roundings to float32 of minima that are made here, in one form: with the most bits,
    the largest group that is a part of all, and with minima or zeros where one has them."""
    if any(part.order is not None for part in parts):
        raise NotAsCodes("layers that are computed as one are quantized in different ways")
    if len({part.codebook for part in parts}) > 1:
        parts = [_without_table(part) for part in parts]
    if len({part.bits for part in parts}) > 1:
        parts = [_in_bytes(part) for part in parts]
    if len({part.group for part in parts}) > 1:
        group = math.gcd(*(part.group or part.inputs for part in parts))
        parts = [part.in_groups(group) for part in parts]
    if any(part.factors is None for part in parts):
        parts = [part.without_factors() for part in parts]
    if any(part.minima is not None for part in parts):
        return [_with_minima(part) for part in parts]
    if any(part.zeros is not None for part in parts):
        return [_with_zeros(part) for part in parts]
    return list(parts)


def _without_table(part: QuantizedWeight) -> QuantizedWeight:
    if part.codebook is None:
        return part
    if any(not -128 <= number <= 127 for number in part.codebook):
        raise NotAsCodes("of layers that are computed as one some have a table of large numbers")
    table = torch.tensor([number + 128 for number in part.codebook], dtype=torch.uint8)
    span = 128 + min(part.codebook), 128 + max(part.codebook)
    return replace(part, codes=table[part.unpacked().long()], bits=8, codebook=None, span=span)


def _in_bytes(part: QuantizedWeight) -> QuantizedWeight:
    if part.bits == 8:
        return part
    plain = part.zeros is None and part.minima is None
    codes, least = part.unpacked(), 120 if plain else 0
    return replace(part, codes=codes + least, bits=8, span=(least, least + 15))


def _with_minima(part: QuantizedWeight) -> QuantizedWeight:
    scales = part.scales.float()
    if part.minima is not None:
        return replace(part, scales=scales, minima=part.minima.float())
    zeros = 2.0 ** (part.bits - 1) if part.zeros is None else part.zeros.float()
    minima = -zeros * scales
    return replace(part, scales=scales, zeros=None, minima=minima, minimum_factors=part.factors)


def _with_zeros(part: QuantizedWeight) -> QuantizedWeight:
    if part.zeros is not None:
        return part
    zeros = torch.full(part.scales.shape, 2 ** (part.bits - 1), dtype=torch.uint8)
    return replace(part, zeros=zeros)
