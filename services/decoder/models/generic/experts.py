"""The experts of a class's layers through the device's ops."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from services.decoder.devices.base.experts import ExpertLayer
from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.generic.attention import NotServed
from services.decoder.ranks.rank_group import RankGroup
from services.decoder.ranks.share import Share
from shared.weights.linear_weight import LinearWeight, in_memory

NAME = "tessera"  # as an experts implementation of transformers
_TRIED = (8, 64)  # rows, and their width, on which a gate is compared
_WIDE = 10.0  # their deviation: a gate with bounds reaches them


class _Experts:
    """Of one module: with `ranks` each has a part of every expert's units."""

    def __init__(
        self, module: Any, ops: BaseOps, share: Share, ranks: RankGroup | None, skips: bool
    ) -> None:
        into, part = (
            ("gate_up_proj", share.halves) if module.has_gate else ("up_proj", share.outputs)
        )
        self._ops, self._ranks = ops, ranks
        self._packed = ops.pack_experts(
            _layer(module, into, share, skips),
            _take(module, into, part),
            _take(module, "down_proj", share.inputs),
        )

    def __call__(self, hidden: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        """hidden [T, H]; index and shares [T, k]: a token's experts and what each counts. Gives [T, H]."""
        out = self._ops.experts(hidden, index, shares, self._packed)
        return out if self._ranks is None else self._ranks.sum(out)


def has_experts(model: nn.Module) -> bool:
    """Whether a module chooses experts that transformers can be told how to compute."""
    return any(map(_is_experts, model.modules()))


def pack_experts(model: Any, ops: BaseOps, divided: bool) -> int:
    """Packs every module of experts that transformers can be told how to compute, and drops its weights. divided: each
    of several ranks has a part of them. Returns how many sums of all ranks a forward then makes. Raises NotServed for
    experts that cannot be divided."""
    share, sums = ops.share if divided else Share(), 0
    skips = bool(getattr(model.config, "zero_expert_num", 0))
    module: Any
    for module in model.modules():
        if not _is_experts(module):
            continue
        if divided and module.has_post_expert_norm:
            raise NotServed("each of its experts ends with a norm, which ranks cannot divide")
        module._packed = _Experts(module, ops, share, ops.ranks if divided else None, skips)
        sums += divided
    return sums


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def _layer(module: Any, into: str, share: Share, skips: bool) -> ExpertLayer:
    count, *sizes = getattr(module, into).shape
    up, hidden = reversed(sizes) if module.is_transposed else sizes
    gates = 2 if module.has_gate else 1
    first, last = share.range(up // gates)
    return ExpertLayer(
        count=count,
        hidden=hidden,
        up=gates * (last - first),
        inner=last - first,
        has_bias=bool(module.has_bias),
        activation=module._apply_gate if module.has_gate else module.act_fn,
        is_swiglu=bool(module.has_gate) and _is_swiglu(module._apply_gate),
        norm=module.post_expert_norm if module.has_post_expert_norm else None,
        skips=skips,
    )


def _is_swiglu(gate: Callable[[Tensor], Tensor]) -> bool:
    """Whether a class's way from gates and what they gate is silu(first half) * second half."""
    rows, width = _TRIED
    drawn = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(0)) * _WIDE
    first, second = drawn.chunk(2, -1)
    try:
        return torch.allclose(gate(drawn), nn.functional.silu(first) * second)
    except (RuntimeError, TypeError, ValueError):  # it takes rows of its own width alone
        return False


def _take(
    module: Any, name: str, part: Callable[[LinearWeight], LinearWeight]
) -> Iterator[LinearWeight]:
    """The layer of each expert; at the end the module's own tensors are dropped."""
    weights = getattr(module, name).detach()  # [experts, out, inputs]
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    for weight, bias in zip(weights, biases, strict=True):
        yield part(in_memory(weight.contiguous(), bias, name))
    setattr(module, name, None)


def _experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What transformers calls; see `_Experts`."""
    found: Tensor = module._packed(hidden, index, weights)
    return found


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
