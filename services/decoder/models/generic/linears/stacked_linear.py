"""Linear layers of one module that get the same input, such as those of queries, keys and values, as one product."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.generic.linears.linear import (
    PackedLinear,
    linear_weight,
    pack_children,
    type_of,
)
from shared.weights.linear_weight import StackedWeight


class _Stack:
    """Linear layers of the same input as one product: whichever is called first computes all."""

    def __init__(self, ops: BaseOps, layers: Sequence[Any], names: Sequence[str]) -> None:
        weights = list(map(linear_weight, layers, names))
        self._sizes = [weight.out for weight in weights]
        self._ops = ops
        self._packed = ops.pack(StackedWeight(weights))
        self._x: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        """[rows, out] of one layer; x is kept until the last one has asked."""
        if x is not self._x:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            self._parts = self._ops.linear(rows, self._packed).split(self._sizes, -1)
            self._x = x
        found = self._parts[index].contiguous()
        if index == len(self._sizes) - 1:
            self._x, self._parts = None, ()
        return found


class _Stacked(nn.Module):
    """In the place of one layer of a stack."""

    def __init__(self, stack: _Stack, index: int, layer: Any) -> None:
        super().__init__()
        weight = linear_weight(layer, "")
        self.out_features, self.in_features = weight.out, weight.inputs
        self.weight = torch.empty((weight.out, weight.inputs), dtype=type_of(layer), device="meta")
        self.bias = layer.bias
        self._stack, self._index = stack, index

    def forward(self, x: Tensor) -> Tensor:
        """See `PackedLinear.forward`."""
        if x.dtype != self.weight.dtype:
            raise TypeError(f"rows of {x.dtype} for a layer of {self.weight.dtype}")
        return self._stack.part(x, self._index).view(*x.shape[:-1], self.out_features)


class Calls:
    """Which linear layers a forward has called with which input."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Tensor]] = []  # inputs are kept: no two have one identity

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Notes calls meanwhile."""
        handles = [
            module.register_forward_pre_hook(self._note)
            for module in model.modules()
            if type_of(module) is not None
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs:
            self._calls.append((id(module), inputs[0]))

    def stacks(self, parent: nn.Module) -> list[list[str]]:
        """Names of a module's layers that had the same input, in the order of their calls; each was called once."""
        names = {id(child): name for name, child in parent.named_children()}
        own = [(names[layer], x) for layer, x in self._calls if layer in names]
        count = Counter(name for name, _ in own)
        groups: dict[int, list[str]] = {}
        for name, x in own:
            if count[name] == 1:
                groups.setdefault(id(x), []).append(name)
        return [group for group in groups.values() if len(group) > 1]

    def clear(self) -> None:
        """Drops the inputs."""
        self._calls.clear()


def stack_linears(model: nn.Module, ops: BaseOps, calls: Calls) -> None:
    """Layers of one module that had the same input, such as those of queries, keys and values, become one product,
    and the others one each. One module after the other, so that a checkpoint's shards are dropped on the way."""
    parents = [(path, some) for path, some in model.named_modules() if type_of(some) is None]
    seen = Counter(id(child) for _, parent in parents for child in parent.children())
    known: dict[int, PackedLinear] = {}
    for path, parent in parents:
        for names in calls.stacks(parent):
            layers = [parent.get_submodule(name) for name in names]
            if _can_stack(layers, ops) and all(seen[id(layer)] == 1 for layer in layers):
                stack = _Stack(ops, layers, [f"{path}.{name}" for name in names])
                for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
                    parent._modules[name] = _Stacked(stack, index, layer)
            del layers
        pack_children(parent, path, ops, known)
    calls.clear()


def _can_stack(layers: Sequence[Any], ops: BaseOps) -> bool:
    biases = sum(layer.bias is not None for layer in layers)
    return biases in (0, len(layers)) and all(type_of(one) == ops.dtype for one in layers)
