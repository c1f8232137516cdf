"""Weights that a class multiplies with by functions of torch, where no layer of ours can be put: routers, some experts.

torch's products round by the number of rows; these go through the ops' linear layers, whose rows do not depend on
others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.decoder.devices.base.ops import BaseOps
from services.decoder.steps.attention_meta import Packed
from shared.weights.linear_weight import in_memory

# Rows from which on torch's float32 products on a CPU round alike (`devices/cpu/torch_ops.py`).
_ROWS = 16
_CONVERSIONS = (Tensor.to, Tensor.type, Tensor.float)


class Weight(Tensor):
    """A parameter [out, inputs] of `linear`, or one for each expert: [experts, inputs, out] of `bmm`, or
    [experts, out, inputs] of `linear` with one expert's.

    Which of the two it is its first use says; it is packed then and dropped. Everything else that is done with it is
    done with its numbers.
    """

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
                if func is torch.bmm and own.dtype == own.ops.dtype:
                    return _bmm(args[0], own)
            if func is Tensor.__getitem__ and _is_expert(*args):
                return _expert(*args)
            found = func(*args, **(kwargs or {}))
            if func in _CONVERSIONS and type(found) is Tensor:
                found = _weight(found, args[0].ops, [])
            return found


def guard_parameters(model: nn.Module, ops: BaseOps) -> None:
    """Every parameter of two or three dimensions that no layer of torch has."""
    for module in model.modules():
        if type(module).__module__.startswith("torch.nn"):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim in (2, 3) and parameter.is_floating_point():
                del module._parameters[name]
                setattr(module, name, _packed(parameter.detach(), ops, name))


def _packed(values: Tensor, ops: BaseOps, name: str) -> Weight:
    wanted = values.ndim == 2 and values.dtype == ops.dtype
    return _weight(values, ops, [ops.pack(in_memory(values, name=name))] if wanted else [])


def _weight(values: Tensor, ops: BaseOps, packed: Sequence[Packed]) -> Weight:
    weight = values.as_subclass(Weight)
    weight.ops, weight.packed = ops, packed
    return weight


def _pack_experts(own: Weight, transposed: bool) -> None:
    """In the form that `linear` wants of each expert: [out, inputs]. The originals are dropped."""
    if own.packed:
        return
    values = own.as_subclass(Tensor)
    own.packed = [
        own.ops.pack(in_memory((expert.T if transposed else expert).contiguous()))
        for expert in values
    ]
    own.data = values.new_zeros(()).expand(values.shape)


def _is_expert(own: Any, index: Any) -> bool:
    return isinstance(own, Weight) and own.ndim == 3 and type(index) is int


def _expert(own: Weight, index: int) -> Weight:
    """The weight [out, inputs] of one expert."""
    if own.dtype != own.ops.dtype:
        return _weight(own.as_subclass(Tensor)[index], own.ops, [])
    _pack_experts(own, transposed=False)
    return _weight(own.as_subclass(Tensor)[index], own.ops, [own.packed[index]])


def _linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if weight.packed and x.dtype == weight.ops.dtype:
        found = weight.ops.linear(rows.contiguous(), weight.packed[0])
    else:
        missing = max(0, _ROWS - len(rows))
        found = F.linear(F.pad(rows, (0, 0, 0, missing)), weight.as_subclass(Tensor))[: len(rows)]
    found = found.view(*x.shape[:-1], weight.shape[0])
    return found if bias is None else found + bias


def _bmm(x: Tensor, weight: Weight) -> Tensor:
    _pack_experts(weight, transposed=True)
    linear = weight.ops.linear
    return torch.stack(
        [linear(rows.contiguous(), packed) for rows, packed in zip(x, weight.packed, strict=True)]
    )
