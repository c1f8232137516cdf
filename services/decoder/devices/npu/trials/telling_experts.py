"""Tokens and experts on which an operator that takes a wrong expert, weight or order is told."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.devices.base.experts import ExpertLayer, PackedExperts
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.npu.forms import Form, Grouping, Routing
from shared.weights.linear_weight import LinearWeight, in_memory

_COUNTS = (1, 7, 200)  # tokens of a call
_CHOSEN = 4  # experts of each
# Elements of all weights.
_MOST_ELEMENTS = 1 << 24
_SMALL = 64  # of any size
_TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float32: 1e-3}


class Operators(Protocol):
    """What computes, such as `NpuOps`."""

    dtype: torch.dtype
    device: torch.device

    def experts_in(
        self,
        form: Form | None,
        layer: ExpertLayer,
        up: Iterator[LinearWeight],
        down: Iterator[LinearWeight],
    ) -> PackedExperts:
        """Experts in a form."""

    def experts(self, x: Tensor, index: Tensor, shares: Tensor, experts: PackedExperts) -> Tensor:
        """See `BaseOps.experts`."""


def experts_error(ops: Operators, asked: Grouping, form: Form) -> tuple[float, float]:
    """The largest difference from the reference on the host, and how large it may be. Waits for the device."""
    worst = max(_error(ops, part, form) for part in _parts(asked))
    return worst, _TOLERANCES[ops.dtype]


def _parts(asked: Grouping) -> Iterator[Grouping]:
    """All of it, or what takes a second: a few experts of these sizes, and as many that are small."""
    each = asked.hidden * (asked.up + asked.inner)
    few = max(2, min(asked.count, _MOST_ELEMENTS // each))
    yield replace(asked, count=few)
    if few < asked.count:
        inner = min(asked.inner, _SMALL)
        up = inner * asked.up // asked.inner
        yield replace(asked, hidden=min(asked.hidden, _SMALL), up=up, inner=inner)


def _error(ops: Operators, asked: Grouping, form: Form) -> float:
    generator = torch.Generator().manual_seed(0)
    count, layer = asked.count, _layer(asked)
    weights = [
        list(_weights(asked, sizes, ops.dtype, generator))
        for sizes in ((asked.up, asked.hidden), (asked.hidden, asked.inner))
    ]
    plain = BaseOps(torch.device("cpu"), ops.dtype)
    ours = ops.experts_in(form, layer, iter(weights[0]), iter(weights[1]))
    theirs = plain.pack_experts(layer, *weights)
    worst = 0.0
    for tokens in _COUNTS:
        x = torch.randn(tokens, asked.hidden, generator=generator).to(ops.dtype)
        k = min(_CHOSEN, count)
        # Some experts get no token, the last one more than others.
        score = torch.rand(tokens, count, generator=generator)
        score[:, -1] += 0.5
        score[:, ::3] -= 1.0 if count > 2 * k else 0.0
        index = score.topk(k).indices
        shares = torch.rand(tokens, k, generator=generator)
        given = (x.to(ops.device), index.to(ops.device), shares.to(ops.device))
        found = ops.experts(*given, ours).cpu().float()
        expected = plain.experts(x, index, shares, theirs).float()
        worst = max(worst, _largest(found - expected))
    return worst


def routing_error(
    choose: Callable[[Tensor, int], tuple[Tensor, Tensor]], asked: Routing, device: torch.device
) -> tuple[float, float]:
    """The same of shares; infinite where another expert is chosen."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for tokens in _COUNTS:
        logits = 3 * torch.randn(tokens, asked.count, generator=generator)
        shares, index = (part.cpu() for part in choose(logits.to(device), asked.k))
        expected, places = logits.softmax(-1).topk(asked.k)
        if not torch.equal(index.long().sort(-1).values, places.sort(-1).values):
            return float("inf"), 0.0
        order, other = index.long().argsort(-1), places.argsort(-1)
        worst = max(worst, _largest(shares.gather(-1, order) - expected.gather(-1, other)))
    return worst, 1e-3


def _layer(asked: Grouping) -> ExpertLayer:
    is_gated = asked.up == 2 * asked.inner
    return ExpertLayer(
        asked.count,
        asked.hidden,
        asked.up,
        asked.inner,
        asked.has_bias,
        _gated if is_gated else F.relu,
        is_swiglu=is_gated,
    )


def _gated(rows: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    return F.silu(first) * second


def _weights(
    asked: Grouping, sizes: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> Iterator[LinearWeight]:
    out, inputs = sizes
    for _ in range(asked.count):
        weight = torch.randn(out, inputs, generator=generator) * inputs**-0.5
        bias = torch.randn(out, generator=generator).to(dtype) if asked.has_bias else None
        yield in_memory(weight.to(dtype), bias)


def _largest(difference: Tensor) -> float:
    return float(torch.nan_to_num(difference.abs().max(), nan=float("inf")))
