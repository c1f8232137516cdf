"""Layers of which each token takes a few parts, its experts (Shazeer et al., 2017)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.steps.attention_meta import Packed

Linear = Callable[[Tensor, Packed], Tensor]
# From logits, float32 [T, experts], to the largest k of their softmax, float32 [T, k], and which those are, int [T, k].
Router = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ExpertLayer:
    """What the experts of a layer have in common: two linear layers each, and what lies between and behind them.

    hidden: inputs of the first and outputs of the second; up: outputs of the first; inner: inputs of the second.
    """

    count: int
    hidden: int
    up: int
    inner: int
    has_bias: bool
    activation: Callable[[Tensor], Tensor]  # [rows, up] to [rows, inner], each row by itself
    is_swiglu: bool = False  # whether that is silu(first half) * second half
    norm: Callable[[Tensor], Tensor] | None = None  # of what an expert gives
    skips: bool = False  # whether a token may go to no expert: its index is then `count` or more


@dataclass(frozen=True)
class PackedExperts:
    """Experts in the form that a device wants."""

    layer: ExpertLayer


@dataclass(frozen=True)
class SingleExperts(PackedExperts):
    """A linear layer for each of them."""

    up: Sequence[Packed]
    down: Sequence[Packed]


def one_by_one(
    x: Tensor, index: Tensor, shares: Tensor, experts: SingleExperts, linear: Linear
) -> Tensor:
    """x [T, H]; index and shares [T, k]: a token's experts and what each counts. Gives [T, H].

    torch's own ways sum a token's experts, and multiply, in an order that depends on the batch; here on the token
    alone.
    """
    layer = experts.layer
    out = torch.zeros_like(x)
    for expert in torch.unique(index).tolist():
        if expert >= len(experts.up):
            continue  # a token that goes to no expert
        token, choice = torch.where(index == expert)
        inner = layer.activation(linear(x[token], experts.up[expert]))
        found = linear(inner.contiguous(), experts.down[expert])
        if layer.norm is not None:
            found = layer.norm(found)
        out[token] += (found * shares[token, choice, None]).to(out.dtype)
    return out
