"""Routers of a class, which choose each token's experts, by the device's own operation where it has one."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.decoder.devices.base.experts import Router
from services.decoder.devices.base.ops import BaseOps

_ROWS = 64
_TOLERANCE = 1e-2  # of a share


def replace_routers(model: nn.Module, ops: BaseOps) -> int:
    """Every router that gives its logits, the largest k of their softmax, which may be made to sum up to 1 and are
    multiplied by one factor, and which those are. Returns how many there are."""
    replaced = 0
    module: Any
    for module in model.modules():
        k, weight = getattr(module, "top_k", None), getattr(module, "weight", None)
        if not type(module).__name__.endswith("Router") or not isinstance(weight, Tensor):
            continue
        choose = ops.router(len(weight), k) if isinstance(k, int) else None
        if choose is not None and (found := _same(module, ops, choose)) is not None:
            module.forward = found
            replaced += 1
    return replaced


class _Router:
    """In the place of a module's `forward`."""

    def __init__(self, module: Any, choose: Router, is_normed: bool, factor: float) -> None:
        self._module, self._choose = module, choose
        self._is_normed, self._factor = is_normed, factor
        self._types = (torch.float32, torch.float32)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, experts], shares and indices [T, k] of rows [..., H]."""
        wide, narrow = self._types
        module, rows = self._module, hidden.reshape(-1, hidden.shape[-1])
        logits = F.linear(rows.to(wide), module.weight.to(wide), getattr(module, "bias", None))
        shares, index = self._choose(logits.float())
        if self._is_normed:
            shares = shares / shares.sum(-1, keepdim=True)
        return logits, (shares * self._factor).to(narrow), index

    def agrees(self, rows: Tensor, given: tuple[Tensor, ...]) -> bool:
        """Whether it gives what the module gave; takes over its element types."""
        self._types = given[0].dtype, given[1].dtype
        logits, shares, index = self(rows)
        (ours, chosen), (theirs, others) = (
            (part.float().sort(-1)[0], logits.float().gather(-1, places.long()).sort(-1)[0])
            for part, places in ((shares, index), given[1:])
        )
        # Of equal logits either may be chosen.
        return torch.equal(chosen, others) and torch.allclose(ours, theirs, _TOLERANCE, _TOLERANCE)


def _same(module: Any, ops: BaseOps, choose: Router) -> _Router | None:
    rows = torch.randn(_ROWS, module.weight.shape[-1], generator=torch.Generator().manual_seed(0))
    rows = rows.to(ops.device, ops.dtype)
    try:
        given = module(rows)
        if [x.shape for x in given] != [(_ROWS, len(module.weight)), *[(_ROWS, module.top_k)] * 2]:
            return None
        found = _variants(module, choose)
        return next((one for one in found if one.agrees(rows, given)), None)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
    ):  # it is called otherwise
        return None


def _variants(module: Any, choose: Router) -> Iterator[_Router]:
    factor = getattr(module, "routed_scaling_factor", 1.0)
    for is_normed in (False, True):
        yield _Router(module, choose, is_normed, float(factor))
