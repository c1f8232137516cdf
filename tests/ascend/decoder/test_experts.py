"""Experts by operators for them: what the reference gives, by a form that is right, without waiting for the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from services.decoder.devices.base.experts import ExpertLayer
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.forms import Grouping, Routing
from services.decoder.devices.npu.weights.grouped_experts import GroupedExperts
from shared.weights.linear_weight import LinearWeight, in_memory
from tests.ascend.decoder.test_tokens import check
from tests.ascend.simulator import counters
from tests.ascend.support import largest_difference, random
from tests.support.generic_models import make_generic_checkpoint

COUNT, HIDDEN, INNER, CHOSEN = 8, 64, 32, 2
ASKED = Grouping(COUNT, HIDDEN, 2 * INNER, INNER)
TYPES = (torch.float16, torch.bfloat16)


def gelu_gate(rows: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    return F.gelu(first) * second


def weights(
    seed: int, out: int, inputs: int, has_bias: bool, dtype: torch.dtype
) -> list[LinearWeight]:
    return [
        in_memory(
            random(out, inputs, seed=seed + expert, dtype=dtype) * 0.1,
            random(out, seed=seed + expert, dtype=dtype) if has_bias else None,
        )
        for expert in range(COUNT)
    ]


def difference(device: NpuDevice, layer: ExpertLayer, tokens: int = 21) -> float:
    """From the reference on the host; checks that nothing waits."""
    dtype = device.ops.dtype
    plain = BaseOps(torch.device("cpu"), dtype)
    parts = [
        weights(10, 2 * INNER, HIDDEN, layer.has_bias, dtype),
        weights(50, HIDDEN, INNER, layer.has_bias, dtype),
    ]
    x, shares = random(tokens, HIDDEN, dtype=dtype), torch.rand(tokens, CHOSEN)
    index = random(tokens, COUNT, seed=1, dtype=torch.float32).topk(CHOSEN).indices
    packed = device.ops.pack_experts(layer, *parts)
    rows, places, parts_of = (part.to("npu") for part in (x, index, shares))
    torch_npu.npu.synchronize()
    with counters.counted() as cost:
        found = device.ops.experts(rows, places, parts_of, packed)
    assert isinstance(packed, GroupedExperts) == (not counters.synchronisations(cost))
    return largest_difference(
        found, plain.experts(x, index, shares, plain.pack_experts(layer, *parts))
    )


def layer_of(has_bias: bool = False, **changes: Any) -> ExpertLayer:
    values: dict[str, Any] = {"activation": gelu_gate, "has_bias": has_bias}
    return ExpertLayer(COUNT, HIDDEN, 2 * INNER, INNER, **{**values, **changes})


SWIGLU = layer_of(activation=lambda rows: F.silu(rows[:, :INNER]) * rows[:, INNER:], is_swiglu=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_are_the_references(dtype: torch.dtype, has_bias: bool) -> None:
    tolerance = 0.02 if dtype == torch.float16 else 0.1
    device = NpuDevice(dtype)
    assert difference(device, layer_of(has_bias)) < tolerance
    assert difference(device, layer_of(has_bias, norm=lambda rows: rows * 2), 1) < 2 * tolerance


def test_a_gate_that_the_device_has_is_its_own() -> None:
    counters.kernels.clear()
    assert difference(NpuDevice(torch.float16), SWIGLU) < 0.02
    assert counters.kernels["npu_swiglu"]


def test_experts_of_which_a_token_may_have_none_are_computed_one_by_one() -> None:
    assert difference(NpuDevice(torch.float16), layer_of(skips=True)) < 0.02


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("call aclnnGroupedMatmulV4 failed, error code is 561002")


def mix_tokens_up(rows: Tensor, order: Tensor, **given: Any) -> Tensor:
    found: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, order.roll(1), **given)
    return found


def take_the_next_group(x: Any, weight: Any, **given: Any) -> Any:
    return torch.ops.npu.npu_grouped_matmul(x, [weight[0].roll(1, 0)], **given)


@pytest.mark.parametrize(
    ("wrong", "taken"),
    [
        ({}, "grouped"),
        ({"npu_moe_token_unpermute": mix_tokens_up}, "grouped_finalize"),
        ({"npu_moe_token_unpermute": refuse}, "grouped_finalize"),
        ({"npu_grouped_matmul": take_the_next_group}, None),
        ({"npu_moe_init_routing_v2": refuse}, None),
    ],
)
def test_the_first_form_that_is_right_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wrong: dict[str, Callable[..., Any]],
    taken: str | None,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is known of these kernels
    for name, kernel in wrong.items():
        monkeypatch.setattr(torch_npu, name, kernel)
    device = NpuDevice(torch.float16)
    assert difference(device, SWIGLU) < 0.02
    form = device.ops.forms.form(ASKED)
    assert (None if form is None else form.name) == taken


def test_a_form_may_be_pinned_or_forbidden() -> None:
    pinned = NpuDevice(torch.float16, forms="grouped_finalize").ops
    assert pinned.forms.form(ASKED) == pinned.known_forms(ASKED)[1]
    without = NpuDevice(torch.float16, forms="-grouped,-grouped_finalize,-gating_softmax").ops
    assert without.forms.form(ASKED) is None and without.router(COUNT, CHOSEN) is None


def test_a_choice_is_that_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logits = random(9, 16, dtype=torch.float32)
    choose = NpuDevice(torch.float16).ops.router(16, 4)
    assert choose is not None
    shares, index = (part.cpu() for part in choose(logits.to("npu")))
    expected, places = logits.softmax(-1).topk(4)
    assert torch.equal(index.long(), places) and largest_difference(shares, expected) < 1e-6
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = torch_npu.npu_moe_gating_top_k_softmax

    def of_the_smallest(x: Tensor, k: int) -> Any:
        return kernel(-x, k=k)

    monkeypatch.setattr(torch_npu, "npu_moe_gating_top_k_softmax", of_the_smallest)
    assert NpuDevice(torch.float16).ops.forms.form(Routing(16, 4)) is None


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("deepseek_v2", marks=pytest.mark.full)]
)
async def test_tokens_of_families_with_experts(
    tmp_path: Path, short_tmp: Path, family: str
) -> None:
    counters.kernels.clear()
    await check(make_generic_checkpoint(tmp_path, family), short_tmp / "s")
    for name in ("npu_moe_gating_top_k_softmax", "npu_moe_init_routing_v2", "npu_grouped_matmul"):
        assert counters.kernels[name], name
    for name in ("cumsum of bool", "mul of complex64"):  # of transformers' code, which is as it is
        counters.on_ai_cpu.pop(name, None)
