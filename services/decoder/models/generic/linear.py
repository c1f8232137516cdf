"""A model's linear layers in the form that the device's ops want; what they were made of is dropped."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.decoder.devices.base.ops import BaseOps
from services.decoder.loading.linear_weight import in_memory


class PackedLinear(nn.Module):
    """In the place of a `nn.Linear` or `Conv1D`. `weight` has only its type and shape, for those who ask for these."""

    def __init__(self, ops: BaseOps, name: str, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, inputs]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        self.bias = bias
        packed = ops.pack(in_memory(weight.detach(), None if bias is None else bias.detach(), name))
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
        weight = weight_of(child)
        if weight is None or weight.dtype != ops.dtype:
            continue
        if id(child) not in known:
            known[id(child)] = PackedLinear(ops, f"{path}.{name}", weight, child.bias)
        parent._modules[name] = known[id(child)]


def weight_of(module: Any) -> Any:
    """[out, inputs], or None for what is no linear layer."""
    if type(module) is nn.Linear:
        return module.weight
    return module.weight.T if type(module) is Conv1D else None
