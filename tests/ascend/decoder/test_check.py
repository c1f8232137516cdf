"""`tessera doctor --npu` finds everything right on the simulated NPU, and tells kernels with a fault."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch_npu
from torch_npu.npu import NPUGraph

from services.decoder.devices.npu.check import result_of_forms
from services.decoder.devices.npu.checks import ranks_check
from services.decoder.devices.npu.checks.check_cases import Cases
from services.decoder.devices.npu.checks.check_steps import StepCases
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.errors import explain
from services.decoder.devices.npu.forms import Asked, Coded, CodedHeads, Heads, Writing
from services.decoder.devices.npu.trials import trials
from shared.hardware.operation_check import Case, Result, try_case

Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def device() -> NpuDevice:
    return NpuDevice(torch.float16)


def try_forms(device: NpuDevice, asked: Asked) -> Result:
    """In this process, whose kernels a test may change."""
    attempts = [(asked, form) for form in device.ops.known_forms(asked)]
    return result_of_forms(device, asked, list(trials.here(device.ops, attempts)), "")


def test_every_operation_is_right(device: NpuDevice) -> None:
    cases = (*Cases(device), *StepCases(device))
    tried = [try_case(case, "", device.synchronize, explain) for case in cases]
    wrong = [result for result in tried if not result.ok]
    assert not wrong
    heads = (Heads(4, 2, 64), Heads(4, 2, 64, window=True), Heads(8, 4, 256))
    codes = (
        Coded(64, 96, 4, 32, has_zeros=True),
        Coded(64, 64, 8, 0, activations=8),
        Coded(64, 64, 8, 0, activations=8, fixed=True),
    )
    cache = (CodedHeads(4, 2, 64, 64), CodedHeads(4, 2, 64, 96, 2), Writing(2, 96, coded=True))
    for asked in (*heads, Writing(2, 192), *codes, *cache):
        assert try_forms(device, asked).ok
    for window in (False, True):
        result = try_forms(device, Heads(4, 2, 64, window=window, sinks=True))
        assert (
            result.ok
            and result.detail is not None
            and result.detail.startswith("TND")
            and "sinks" in result.name
        )


def without_mask(given: Arguments) -> Arguments:
    return {**given, "atten_mask": None, "sparse_mode": 0}


def with_scale_of_one(given: Arguments) -> Arguments:
    return {**given, "scale": 1.0}


def up_to_512_keys(given: Arguments) -> Arguments:
    return _with_lengths(given, [min(512, n) for n in given["actual_seq_lengths_kv"]])


def without_last_key(given: Arguments) -> Arguments:
    return _with_lengths(given, [max(1, n - 1) for n in given["actual_seq_lengths_kv"]])


def with_a_wider_window(given: Arguments) -> Arguments:
    return {**given, "pre_tokens": given["pre_tokens"] + 1}


def with_cumulative_lengths(given: Arguments) -> Arguments:
    lengths = [0, *given["actual_seq_lengths_kv"]]
    return _with_lengths(given, [max(1, b - a) for a, b in pairwise(lengths)])


def _with_lengths(given: Arguments, lengths: list[int]) -> Arguments:
    return {**given, "actual_seq_lengths_kv": lengths}


@pytest.mark.parametrize(
    "fault",
    [
        without_mask,
        with_scale_of_one,
        up_to_512_keys,
        without_last_key,
        with_a_wider_window,
        with_cumulative_lengths,
        None,
    ],
)
def test_a_kernel_with_a_fault_is_told(
    device: NpuDevice,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Arguments], Arguments] | None,
) -> None:
    kernel = torch_npu.npu_fused_infer_attention_score

    def faulty(q: Any, k: Any, v: Any, **given: Any) -> Any:
        if fault is not None:
            return kernel(q, k, v, **fault(given))
        heads = q.shape[-2]  # the heads of one group among those of the others
        order = torch.arange(heads).view(2, -1).T.reshape(-1).to(q.device)
        out, *rest = kernel(q.index_select(-2, order), k, v, **given)
        return (out.index_select(-2, order.float().argsort()), *rest)

    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", faulty)
    result = try_forms(device, Heads(4, 2, 64, window=fault is with_a_wider_window))
    assert not result.ok
    assert result.detail is not None and "no form of the kernel agrees" in result.detail


def without_sinks(given: Arguments) -> Arguments:
    return {**given, "learnable_sink": None}


def with_sinks_of_other_heads(given: Arguments) -> Arguments:
    return {**given, "learnable_sink": given["learnable_sink"].roll(1)}


@pytest.mark.parametrize("fault", [without_sinks, with_sinks_of_other_heads])
def test_a_kernel_with_a_fault_in_its_sinks_is_told(
    device: NpuDevice, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Arguments], Arguments]
) -> None:
    kernel = torch_npu.npu_fused_infer_attention_score_v2

    def faulty(q: Any, k: Any, v: Any, **given: Any) -> Any:
        return kernel(q, k, v, **fault(given))

    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score_v2", faulty)
    result = try_forms(device, Heads(4, 2, 64, sinks=True))
    assert not result.ok
    assert result.detail is not None and "no form of the kernel agrees" in result.detail


def test_an_operation_that_fails_is_explained(
    device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("call aclnnRmsNorm failed, error code is 507015")

    monkeypatch.setattr(torch_npu, "npu_rms_norm", refuse)
    case = next(case for case in Cases(device) if case.name.startswith("rms_norm"))
    result = try_case(case, "", device.synchronize, explain)
    assert not result.ok
    assert result.detail is not None and "ASCEND_LAUNCH_BLOCKING=1" in result.detail


def steps(device: NpuDevice, name: str) -> list[Case]:
    """Those of whole steps with this in their names."""
    return [case for case in StepCases(device) if name in case.name]


def test_a_graph_that_keeps_its_lengths_is_told(
    device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = NPUGraph.update

    def with_those_of_the_capture(graph: NPUGraph, given: list[Arguments]) -> None:
        [arguments] = given
        lengths = [1] * len(arguments["actual_seq_lengths_kv"])
        update(graph, [{"actual_seq_lengths_kv": lengths}])

    monkeypatch.setattr(NPUGraph, "update", with_those_of_the_capture)
    [case] = steps(device, "graph")
    assert not try_case(case, "", device.synchronize, explain).ok


def test_a_kernel_that_leaves_out_keys_of_long_contexts_is_told(
    device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = torch_npu.npu_fused_infer_attention_score

    def up_to_2048_keys(q: Any, k: Any, v: Any, **given: Any) -> Any:
        lengths = [min(2048, n) for n in given["actual_seq_lengths_kv"]]
        return kernel(q, k, v, **_with_lengths(given, lengths))

    case = next(case for case in StepCases(device) if "attention" in case.name)
    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", up_to_2048_keys)
    assert not try_case(case, "", device.synchronize, explain).ok


def test_a_choice_of_tokens_that_goes_wrong_is_told(
    device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = steps(device, "drawn")
    cumsum = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: cumsum(x, dim) - x)
    for case in cases:
        assert not try_case(case, "", device.synchronize, explain).ok


@pytest.mark.parametrize("left_out", [0, 1])
def test_all_devices_are_joined(monkeypatch: pytest.MonkeyPatch, left_out: int) -> None:
    monkeypatch.setattr(torch_npu.npu, "device_count", lambda: 2)
    monkeypatch.setenv("FAKE_NPU_COUNT", "2")
    monkeypatch.setenv("FAKE_HCCL_LEFT_OUT", str(left_out))
    found = list(ranks_check.results())
    assert {result.name.partition(",")[0] for result in found} == {"HCCL"}
    wrong = [result for result in found if not result.ok]
    assert len(wrong) == (4 if left_out else 0)  # of two sizes, told by both ranks
    assert left_out or len(found) == 3
