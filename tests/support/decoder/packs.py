"""Every way in which ops pack a linear layer, found by its name: one that is added is tried as well."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from services.decoder.devices.base.adapters import LinearPlace
from services.decoder.devices.base.experts import ExpertLayer
from services.decoder.devices.base.ops import BaseOps
from services.decoder.steps.attention_meta import Packed
from shared.weights.linear_weight import CodedWeight, Codes, LinearWeight, as_codes, in_memory
from shared.weights.quantized_weight import QuantizedWeight
from tests.support.decoder.coded_weights import FORMS


def packs(ops: BaseOps) -> dict[str, Callable[[LinearWeight], Packed]]:
    """By name: whatever a user of the ops may call with one layer."""
    found = {name: getattr(ops, name) for name in dir(ops) if name.startswith("pack")}
    del found["pack_addition"], found["pack_experts"]  # have several
    assert len(found) >= 4
    return found


class Asked(CodedWeight):
    """Counts who asks for its codes."""

    def __init__(self, codes: QuantizedWeight) -> None:
        super().__init__("asked", len(codes.codes), codes.inputs, None, codes.outputs_between)
        self.times = 0

    def codes(self) -> Codes | None:
        self.times += 1
        return super().codes()


def require_packs_ask(ops: BaseOps) -> None:
    """Each asks for the codes, once."""
    for name, pack in packs(ops).items():
        weight = Asked(FORMS[0].make(32, 64))
        pack(weight)
        assert weight.times == 1, (
            f"{type(ops).__name__}.{name} does not ask whether it is quantized"
        )
    down, up = Asked(FORMS[0].make(32, 64)), Asked(FORMS[0].make(48, 32))
    ops.pack_addition(LinearPlace("down_proj", "down", 0, 48, 64), down, up)
    if (
        type(ops).pack_addition is BaseOps.pack_addition
    ):  # others take the numbers, whatever is stored
        assert (down.times, up.times) == (1, 1)
    into, out_of = ([Asked(FORMS[0].make(*sizes)) for _ in "ab"] for sizes in ((32, 64), (64, 32)))
    ops.pack_experts(ExpertLayer(2, 64, 32, 32, False, torch.relu), into, out_of)
    assert [weight.times for weight in (*into, *out_of)] == [1] * 4


def require_equal_packs(ops: BaseOps) -> None:
    """Codes, also of weights that were cut, stacked and put in another order, are packed as their numbers are, bit for
    bit."""
    for form in FORMS:
        codes = form.make(64, 256)
        bias = torch.linspace(-1, 1, 64)
        quantized = as_codes(codes, bias)
        dense = in_memory(codes.dequantize(ops.dtype), bias)
        for name, pack in packs(ops).items():
            for ours, theirs in (
                (quantized, dense),
                (changed(quantized), changed(dense)),
            ):
                assert _equal(pack(ours), pack(theirs)), f"{name} of {form}"


def changed(weight: LinearWeight) -> LinearWeight:
    """As models do it for one of two ranks."""
    outputs = weight.reordered([*range(32, 64), *range(32)]).shard("out", [(0, 16), (32, 48)])
    return outputs.spread("out", [*range(8, 24), *range(40, 56)], 64)


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if is_dataclass(ours):
        return all(
            _equal(getattr(ours, field.name), getattr(theirs, field.name))
            for field in fields(ours)
            if field.name not in ("call", "views")  # addresses
        )
    return bool(ours == theirs)
