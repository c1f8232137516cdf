"""The experts of a layer, one after the other through the ops' linear layers.

torch's own ways sum a token's experts, and multiply, in an order that depends on the batch; here on the token alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from services.decoder.devices.base.attention_meta import Packed
from services.decoder.devices.base.ops import BaseOps
from services.decoder.loading.linear_weight import in_memory

NAME = "tessera"  # as an experts implementation of transformers


@dataclass(frozen=True)
class PackedExperts:
    """Of each expert the layer into it and the one out of it."""

    ops: BaseOps
    up: list[Packed]
    down: list[Packed]


def pack_experts(model: nn.Module, ops: BaseOps) -> None:
    """Packs every module of experts that transformers can be told how to compute, and drops its weights."""
    module: Any
    for module in model.modules():
        if not hasattr(module, "is_transposed") or not hasattr(module, "down_proj"):
            continue
        into = "gate_up_proj" if module.has_gate else "up_proj"
        module._packed = PackedExperts(
            ops, _pack(module, into, ops), _pack(module, "down_proj", ops)
        )


def _pack(module: Any, name: str, ops: BaseOps) -> list[Packed]:
    weights = getattr(module, name).detach()  # [experts, out, inputs]
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    packed = [
        ops.pack(in_memory(weight.contiguous(), bias, name))
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
    return out


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
