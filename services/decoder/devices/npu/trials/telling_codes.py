"""Weights of codes on which an operator that takes a wrong code, scale, zero point or order is told."""

import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.devices.npu.forms import Coded, Form
from services.decoder.devices.npu.weights import coded_linear
from shared.weights.linear_weight import as_codes
from shared.weights.quantized_weight import QuantizedWeight

_ROWS = (1, 16, 48)
_TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.15}
# Of activations of 8 bits, which the reference has too: another one is the next whole number where a quotient lies
# between two.
_OF_WHOLE = 1.5
# The step and the zero of activations, of which some are larger than the largest one.
_FIXED = (0.02, 5)


def codes_error(
    asked: Coded, form: Form, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """The largest difference of products from those of the host with the same codes, and how large it may be. Waits for
    the device."""
    generator = torch.Generator().manual_seed(0)
    weight = _drawn(asked, dtype, generator)
    bias = torch.randn(asked.out, generator=generator).to(dtype)
    numbers = weight.dequantize(torch.float32)
    read = as_codes(weight).codes()
    assert read is not None
    worst = 0.0
    for shift in (bias, None):
        packed = coded_linear.pack(read, [asked.out], shift, form, (dtype, device))
        for rows in _ROWS:
            x = torch.randn(rows, asked.inputs, generator=generator).to(dtype)
            found = coded_linear.product(x.to(device), packed).cpu().float()
            met = _met(x, weight, form)
            expected = F.linear(met, numbers, None if shift is None else shift.float())
            difference = (found - expected).abs().max()
            worst = max(worst, float(torch.nan_to_num(difference, nan=float("inf"))))
    most = _TOLERANCES[dtype]
    is_whole = form in (coded_linear.WHOLE, coded_linear.FIXED)
    return worst, most * _OF_WHOLE if is_whole else most


def _met(x: Tensor, weight: QuantizedWeight, form: Form) -> Tensor:
    """What codes are multiplied with, in float32."""
    if form == coded_linear.FIXED:
        assert weight.fixed is not None
        step, zero = weight.fixed
        return (((x.float() / step).round() + zero).clamp(-128, 127) - zero) * step
    return rounded(x) if form == coded_linear.WHOLE else x.float()


def rounded(x: Tensor) -> Tensor:
    """Rows of x as whole numbers of 8 bits times a scale each, in float32."""
    steps = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / steps.clamp(min=torch.finfo(torch.float32).tiny)).round() * steps


def _drawn(asked: Coded, dtype: torch.dtype, generator: torch.Generator) -> QuantizedWeight:
    """Of numbers whose products with rows of about 1 are about 1, with scales that the device has as they are."""
    groups, most = -(-asked.inputs // asked.group) if asked.group else 1, 2**asked.bits
    shape = (asked.out, groups)
    codes = torch.randint(256, (asked.out, asked.inputs * asked.bits // 8), generator=generator)
    size = 4 / most * asked.inputs**-0.5
    scales = torch.rand(shape, generator=generator).add(0.5).mul(size).to(dtype)
    zeros = torch.randint(most // 4, most * 3 // 4, shape, generator=generator).to(torch.uint8)
    return QuantizedWeight(
        codes.to(torch.uint8),
        scales,
        asked.bits,
        asked.group,
        zeros if asked.has_zeros else None,
        activations=asked.activations,
        fixed=_FIXED if asked.fixed else None,
    )
