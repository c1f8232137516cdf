"""What a product with codes is, in whole numbers of 64 bits, with each rounding to float32 by itself."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.weights.quantized_weight import QuantizedWeight

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]


def coded_linear(x: Tensor, weight: QuantizedWeight, digits: int) -> Tensor:
    """float32 [rows, out] of rows [rows, inputs], as `cpu_kernels/source/linear/quantized_linear.h` says it."""
    rows, weight = x.float().numpy(), weight.without_factors()
    if weight.order is not None:
        rows = rows[:, weight.order.numpy()]
    numbers, scales = _numbers(weight), weight.scales.float().numpy()
    minima = None if weight.minima is None else weight.minima.float().numpy()
    group = weight.group or weight.inputs
    found = np.zeros((len(rows), len(numbers)), np.float32)
    for number, first in enumerate(range(0, weight.inputs, group)):
        columns = slice(first, first + group)
        p, steps = whole_numbers(rows[:, columns], digits)
        high = (p + 64) >> 7 if digits == 2 else p
        sums = (high @ numbers[:, columns].T).astype(np.float32)
        if digits == 2:
            low = ((p - 128 * high) @ numbers[:, columns].T).astype(np.float32)
            sums = _fused(sums, np.full_like(sums, 128), low)
        found = _fused(sums, steps[:, None] * scales[:, number], found)
        if minima is not None:
            shifts = steps * p.sum(1).astype(np.float32)
            least = np.broadcast_to(minima[:, number], found.shape)
            found = _fused(least, np.broadcast_to(shifts[:, None], found.shape), found)
    return torch.from_numpy(found)


def whole_numbers(group: Floats, digits: int) -> tuple[Whole, Floats]:
    """Those of a group of inputs [rows, inputs], and each row's step."""
    most = np.abs(group).max(1)
    _, exponents = np.frexp(most)
    one, two = np.float32(1), np.float32(127)
    steps, inverse = most / two, two / np.where(most == 0, one, most)
    if digits == 2:
        steps, inverse = np.ldexp(one, exponents - 13), np.ldexp(one, 13 - exponents)
    nothing = most < np.float32(2**-100)
    p = np.rint(group.astype(np.float64) * inverse[:, None]).astype(np.int64)
    p[nothing] = 0
    return p, np.where(nothing, np.float32(0), steps).astype(np.float32)


def _numbers(weight: QuantizedWeight) -> Whole:
    codes = weight.unpacked().numpy().astype(np.int64)
    if weight.codebook is not None:
        return np.asarray(weight.codebook, np.int64).take(codes)
    if weight.minima is not None:
        return codes
    if weight.zeros is None:
        codes -= 2 ** (weight.bits - 1)
        return codes
    group = weight.group or weight.inputs
    zeros: Whole = weight.zeros.numpy().astype(np.int64).repeat(group, 1)
    found: Whole = codes - zeros[:, : weight.inputs]
    return found


def _fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a b + c in one rounding: the sum in float64, rounded to odd, which the second rounding cannot mistake (Boldo and
    Melquiond, 2008)."""
    product, c64 = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c64
    back = total - product
    error = (product - (total - back)) + (c64 - back)
    is_even = total.view(np.int64) & 1 == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    total = np.where((error != 0) & is_even, np.nextafter(total, toward), total)
    return total.astype(np.float32)
