"""Weights of linear layers as the matrix unit reads them (FRACTAL_NZ). vllm-ascend has them so on a 910B for types of
16 bits where it is told to alone, as they have been slower, or wrong together with graphs, in some releases."""

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from services.decoder.devices.npu.attention.tiled_attention import NZ, TILE
from services.decoder.devices.npu.forms import Form, Weights
from shared.hardware.operation_check import seconds_of

TILED = Form("weights_nz")
_ROWS = (1, 16, 48)
_TIMED = (1, 64)
_GAIN = 0.98  # of the time that plain weights take, at most
_TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.15}


def fits(weight: Tensor) -> bool:
    """Whether nothing of a tile would be filled up, and no side is 1, which products refuse."""
    return all(size > TILE and size % TILE == 0 for size in weight.shape)


def tiled(weight: Tensor) -> Tensor:
    """A copy [out, inputs] in tiles."""
    torch_npu.npu.config.allow_internal_format = True  # else a 910B keeps rows
    found: Tensor = torch_npu.npu_format_cast(weight, NZ)
    return found


def weight_error(asked: Weights, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """The largest difference of products from those of the host, and how large it may be. Waits for the device. Raises
    RuntimeError where they should be faster than with plain weights, and are not."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(asked.out, asked.inputs, generator=generator) * asked.inputs**-0.5
    weight = weight.to(dtype)
    plain = weight.to(device)
    ours = tiled(plain)
    worst = 0.0
    for rows in _ROWS:
        x = torch.randn(rows, asked.inputs, generator=generator).to(dtype)
        found = F.linear(x.to(device), ours).cpu().float()
        difference = (found - F.linear(x.float(), weight.float())).abs().max()
        worst = max(worst, float(torch.nan_to_num(difference, nan=float("inf"))))
    if asked.faster:
        one, other = (_seconds(each, asked.inputs) for each in (ours, plain))
        if one > _GAIN * other:
            raise RuntimeError(f"{1e6 * one:.0f} us a product, and {1e6 * other:.0f} us without")
    return worst, _TOLERANCES[dtype]


def _seconds(weight: Tensor, inputs: int) -> float:
    """Of a product with few rows and one with more."""
    total = 0.0
    for rows in _TIMED:
        x = torch.zeros((rows, inputs), dtype=weight.dtype, device=weight.device)
        total += seconds_of(lambda x=x: F.linear(x, weight), torch_npu.npu.synchronize)  # type: ignore[misc]
    return total
