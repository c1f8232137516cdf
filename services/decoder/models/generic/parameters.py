"""Weights that a class multiplies with by functions of torch, where no layer of ours can be put: routers, some experts.

torch's products round by the number of rows; these go through the ops' linear layers, whose rows do not depend on
others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.decoder.devices.base.attention_meta import Packed
from services.decoder.devices.base.ops import BaseOps
from services.decoder.loading.linear_weight import in_memory

# Rows from which on torch's float32 products on a CPU round alike (`devices/cpu/torch_ops.py`).
_ROWS = 16
_CONVERSIONS = (Tensor.to, Tensor.type, Tensor.float)


class Weight(Tensor):
    """A parameter [out, inputs] of `linear`, or [experts, inputs, out] of `bmm`. Everything else that is done with it
    is done with its numbers."""

    ops: BaseOps
    packed: Sequence[Packed]  # none where its type is not the ops'

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            own = args[1] if len(args) > 1 else None
            if isinstance(own, Weight):
                if func is F.linear:
                    return _linear(args[0], own, *args[2:], **(kwargs or {}))
                if func is torch.bmm and own.packed:
                    return _bmm(args[0], own)
            found = func(*args, **(kwargs or {}))
            if func in _CONVERSIONS and type(found) is Tensor:
                found = _weight(found, args[0].ops, [])
            return found


def guard_parameters(model: nn.Module, ops: BaseOps) -> None:
    """Every parameter of two or three dimensions that no layer of torch has. Originals of three are dropped."""
    for module in model.modules():
        if type(module).__module__.startswith("torch.nn"):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim in (2, 3) and parameter.is_floating_point():
                del module._parameters[name]
                setattr(module, name, _packed(parameter.detach(), ops, name))


def _packed(values: Tensor, ops: BaseOps, name: str) -> Weight:
    if values.dtype != ops.dtype:
        return _weight(values, ops, [])
    if values.ndim == 2:
        return _weight(values, ops, [ops.pack(in_memory(values, name=name))])
    packed = [ops.pack(in_memory(expert.T.contiguous(), name=name)) for expert in values]
    return _weight(values.new_zeros(()).expand(values.shape), ops, packed)


def _weight(values: Tensor, ops: BaseOps, packed: Sequence[Packed]) -> Weight:
    weight = values.as_subclass(Weight)
    weight.ops, weight.packed = ops, packed
    return weight


def _linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if weight.packed and x.dtype == weight.ops.dtype:
        found = weight.ops.linear(rows.contiguous(), weight.packed[0])
    else:
        missing = max(0, _ROWS - len(rows))
        found = F.linear(F.pad(rows, (0, 0, 0, missing)), weight.as_subclass(Tensor))[: len(rows)]
    found = found.view(*x.shape[:-1], -1)
    return found if bias is None else found + bias


def _bmm(x: Tensor, weight: Weight) -> Tensor:
    linear = weight.ops.linear
    return torch.stack(
        [linear(rows.contiguous(), packed) for rows, packed in zip(x, weight.packed, strict=True)]
    )
