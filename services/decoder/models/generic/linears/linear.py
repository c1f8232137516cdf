"""A model's linear layers in the form that the device's ops want; what they were made of is dropped."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.generic.linears.taken_linear import TakenLinear
from shared.weights.linear_weight import LinearWeight, in_memory


class PackedLinear(nn.Module):
    """In the place of a `nn.Linear` or `Conv1D`. `weight` has only its type and shape, for those who ask for these."""

    def __init__(self, ops: BaseOps, weight: LinearWeight) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.out, weight.inputs
        self.weight = torch.empty((weight.out, weight.inputs), dtype=ops.dtype, device="meta")
        self.bias = weight.bias
        packed = ops.pack(weight)
        self._run: Callable[[Tensor], Tensor] = lambda rows: ops.linear(rows, packed)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., out]. Raises TypeError for rows of another type than the weight's."""
        if x.dtype != self.weight.dtype:
            raise TypeError(f"rows of {x.dtype} for a layer of {self.weight.dtype}")
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._run(rows).view(*x.shape[:-1], self.out_features)


def pack_children(
    parent: nn.Module, path: str, ops: BaseOps, known: dict[int, PackedLinear]
) -> None:
    """The linear layers of one module whose weights are of the ops' type; others stay torch's. `known`: those packed so
    far, by the identity of what they were made of: a layer may hang in several places."""
    child: Any
    for name, child in list(parent.named_children()):
        if type_of(child) != ops.dtype:
            continue
        if id(child) not in known:
            known[id(child)] = PackedLinear(ops, linear_weight(child, f"{path}.{name}"))
        parent._modules[name] = known[id(child)]


def type_of(module: Any) -> torch.dtype | None:
    """Of a linear layer's weight; None for what is no linear layer."""
    if type(module) is TakenLinear:
        return module.dtype
    found: torch.dtype | None = module.weight.dtype if type(module) in (nn.Linear, Conv1D) else None
    return found


def linear_weight(module: Any, name: str) -> LinearWeight:
    """What `module`, a linear layer, computes with."""
    bias = None if module.bias is None else module.bias.detach()
    if type(module) is TakenLinear:
        module.taken.bias = bias
        return module.taken
    weight = module.weight.T if type(module) is Conv1D else module.weight
    return in_memory(weight.detach(), bias, name)
