"""Norms, rotary positions and the gated activation of a layer. Sums are float32, as in the device's kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_npu import npu

from tests.ascend.simulator.dispatch import kernel
from tests.ascend.simulator.errors import require
from tests.ascend.simulator.personality import personality

_SMALLEST_ROW = 32  # bytes of a normed row, on 310P
_MOST_ROTATED, _MOST_ROTARY_HEADS = 896, 1000
_COMPILED_ROTATION, _PAIR_ROTATIONS = 128, (64, 128)


def require_contiguous(name: str, **tensors: Tensor | None) -> None:
    """Raises Refused for a tensor that is not."""
    for argument, tensor in tensors.items():
        if tensor is not None:
            where = f"{argument} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
            require(tensor.is_contiguous(), f"{name}: {where} must be contiguous")


def _normed(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * factor * gamma.float()).to(x.dtype), factor


def _check_norm(name: str, x: Tensor, gamma: Tensor) -> None:
    require(
        gamma.shape == x.shape[-gamma.dim() :],
        f"{name}: gamma {list(gamma.shape)}, x {list(x.shape)}",
    )
    wide_enough = x.shape[-1] * x.element_size() >= _SMALLEST_ROW
    require(wide_enough or not personality().is_310p, f"{name}: rows below {_SMALLEST_ROW} bytes")


@kernel("npu", "npu_rms_norm")
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    _check_norm("npu_rms_norm", input, gamma)
    require(
        gamma.dtype in (input.dtype, torch.float32),
        f"npu_rms_norm: gamma {gamma.dtype}, x {input.dtype}",
    )
    return _normed(input, gamma, epsilon)


@kernel("npu", "npu_add_rms_norm")
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    _check_norm("npu_add_rms_norm", x1, gamma)
    require(
        x1.dtype == x2.dtype == gamma.dtype, "npu_add_rms_norm: x1, x2 and gamma differ in dtype"
    )
    require(x1.shape == x2.shape, "npu_add_rms_norm: x1 and x2 differ in shape")
    total = x1 + x2
    result, factor = _normed(total, gamma, epsilon)
    if personality().is_310p:
        factor = torch.full_like(factor, float("nan"))
    return result, factor, total


@kernel("npu", "npu_rotary_mul")
def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    name = "npu_rotary_mul"
    if personality().is_310p:
        compiled = not npu.is_jit_compile_false() and input.shape[-1] == _COMPILED_ROTATION
        require(compiled, f"{name}: on 310P with jit_compile and heads of 128 alone")
    require(
        rotary_mode == "half" and rotate is None, f"{name}: mode {rotary_mode} is not simulated"
    )
    require(input.dim() == 4, f"{name}: {input.dim()} dimensions instead of 4")
    require_contiguous(name, input=input, r1=r1, r2=r2)
    batch, heads, size = input.shape[0], input.shape[2], input.shape[3]
    require(size % 2 == 0 and size < _MOST_ROTATED, f"{name}: head size {size}")
    require(max(batch, heads) < _MOST_ROTARY_HEADS, f"{name}: shape {list(input.shape)}")
    require(
        r1.dtype == r2.dtype == input.dtype, f"{name}: {r1.dtype} and {r2.dtype} for {input.dtype}"
    )
    require(r1.shape == r2.shape and r1.shape[-1] == size, f"{name}: cosines {list(r1.shape)}")
    return _rotated(input, r1, r2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x.float() * cos.float() + turned * sin.float()).to(x.dtype)


@kernel("npu", "npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor]:
    """In place."""
    name = "npu_apply_rotary_pos_emb"
    require(
        layout in ("BSND", "BSH") and rotary_mode == "half",
        f"{name}: {layout} and {rotary_mode} are not simulated",
    )
    require_contiguous(name, query=query, key=key, cos=cos, sin=sin)
    batch, length, _, size = query.shape
    require(size in _PAIR_ROTATIONS, f"{name}: head size {size} is not one of {_PAIR_ROTATIONS}")
    require(
        key.shape[:2] == (batch, length) and key.shape[-1] == size,
        f"{name}: queries {list(query.shape)} and keys {list(key.shape)}",
    )
    require(
        list(cos.shape) == list(sin.shape) == [batch, length, 1, size],
        f"{name}: cosines {list(cos.shape)}",
    )
    require(
        query.dtype == key.dtype == cos.dtype == sin.dtype,
        f"{name}: {query.dtype}, {key.dtype}, {cos.dtype} and {sin.dtype}",
    )
    return query.copy_(_rotated(query, cos, sin)), key.copy_(_rotated(key, cos, sin))


@kernel("npu", "npu_swiglu")
def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    require_contiguous("npu_swiglu", input=input)
    require(input.shape[dim] % 2 == 0, f"npu_swiglu: shape {list(input.shape)}")
    if personality().is_310p:
        require(
            input.shape[-1] % 32 == 0,
            f"npu_swiglu: rows of {input.shape[-1]}, on 310P multiples of 32",
        )
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)
