"""The experts of a layer, one after the other through the ops' linear layers.

torch's own ways sum a token's experts, and multiply, in an order that depends on the batch; here on the token alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.generic.attention import NotServed
from services.decoder.ranks.rank_group import RankGroup
from services.decoder.ranks.share import Share
from services.decoder.steps.attention_meta import Packed
from shared.weights.linear_weight import LinearWeight, in_memory

NAME = "tessera"  # as an experts implementation of transformers


@dataclass(frozen=True)
class PackedExperts:
    """Of each expert the layer into it and the one out of it; with `ranks` each has a part of every expert's units."""

    ops: BaseOps
    ranks: RankGroup | None
    up: list[Packed]
    down: list[Packed]


def has_experts(model: nn.Module) -> bool:
    """Whether a module chooses experts that transformers can be told how to compute."""
    return any(map(_is_experts, model.modules()))


def pack_experts(model: nn.Module, ops: BaseOps, divided: bool) -> int:
    """Packs every module of experts that transformers can be told how to compute, and drops its weights. divided: each
    of several ranks has a part of them. Returns how many sums of all ranks a forward then makes. Raises NotServed for
    experts that cannot be divided."""
    share, sums = ops.share if divided else Share(), 0
    module: Any
    for module in model.modules():
        if not _is_experts(module):
            continue
        if divided and module.has_post_expert_norm:
            raise NotServed("each of its experts ends with a norm, which ranks cannot divide")
        into, part = (
            ("gate_up_proj", share.halves) if module.has_gate else ("up_proj", share.outputs)
        )
        up, down = _pack(module, into, ops, part), _pack(module, "down_proj", ops, share.inputs)
        module._packed = PackedExperts(ops, ops.ranks if divided else None, up, down)
        sums += divided
    return sums


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def _pack(
    module: Any, name: str, ops: BaseOps, part: Callable[[LinearWeight], LinearWeight]
) -> list[Packed]:
    weights = getattr(module, name).detach()  # [experts, out, inputs]
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    packed = [
        ops.pack(part(in_memory(weight.contiguous(), bias, name)))
        for weight, bias in zip(weights, biases, strict=True)
    ]
    setattr(module, name, None)
    return packed


def _experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H]; index and weights [T, k]: a token's experts and their shares. Returns [T, H]."""
    packed: PackedExperts = module._packed
    linear = packed.ops.linear
    out = torch.zeros_like(hidden)
    for expert in torch.unique(index).tolist():
        if expert >= len(packed.up):
            continue  # a token that goes to no expert
        token, choice = torch.where(index == expert)
        inner = linear(hidden[token], packed.up[expert])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        found = linear(inner.contiguous(), packed.down[expert])
        if module.has_post_expert_norm:
            found = module.post_expert_norm(found)
        out[token] += (found * weights[token, choice, None]).to(out.dtype)
    return out if packed.ranks is None else packed.ranks.sum(out)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
