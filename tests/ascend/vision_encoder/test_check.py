"""What `tessera doctor --npu` tries of towers is right on the simulated NPU, and tells kernels with a fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu

from services.vision_encoder.devices.npu.check import results
from services.vision_encoder.devices.npu.check_cases import Cases
from services.vision_encoder.devices.npu.ops import NpuOps
from shared.hardware.operation_check import Result, try_case

Arguments = dict[str, Any]


def tried(named: str) -> list[Result]:
    """Cases whose names begin so."""
    ops = NpuOps(torch.device("npu", 0), torch.float16)
    cases = list(Cases(ops).named(named))
    assert cases
    return [try_case(case, "", torch_npu.npu.synchronize, str) for case in cases]


@pytest.mark.full
def test_every_operation_is_right() -> None:
    tried = list(results((torch.float16,)))
    assert [result for result in tried if not result.ok] == []
    attention = [result.detail or "" for result in tried if result.name.startswith("attention")]
    assert len(attention) > 6 and all(detail.startswith("fused") for detail in attention)


def with_scale_of_one(given: Arguments) -> Arguments:
    return {**given, "scale": 1.0}


def as_one_segment(given: Arguments) -> Arguments:
    ends = given["actual_seq_lengths"][-1:]
    return {**given, "actual_seq_lengths": ends, "actual_seq_lengths_kv": ends}


def without_the_last_key(given: Arguments) -> Arguments:
    *before, last = given["actual_seq_lengths_kv"]
    return {**given, "actual_seq_lengths_kv": [*before, last - 1]}


@pytest.mark.parametrize("fault", [with_scale_of_one, as_one_segment, without_the_last_key])
def test_attention_with_a_fault_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Arguments], Arguments]
) -> None:
    kernel = torch_npu.npu_fused_infer_attention_score
    monkeypatch.setattr(
        torch_npu,
        "npu_fused_infer_attention_score",
        lambda q, k, v, **given: kernel(q, k, v, **fault(given)),
    )
    for heads in ("16 heads of 64", "16 heads of 72"):  # the first needs no zeros
        results = tried(f"attention of pictures, {heads}")
        assert [(result.ok, result.detail) for result in results] == [(True, "plain torch")]


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        ("npu_rotary_mul", "attention of pictures, 16 rotated heads of 72"),
        ("npu_swiglu", "linear with a gate"),
        ("npu_rms_norm", "RMS norm"),
        ("npu_add_rms_norm", "RMS norm"),
    ],
)
def test_an_operation_with_a_fault_is_told(
    monkeypatch: pytest.MonkeyPatch, kernel: str, named: str
) -> None:
    right = getattr(torch_npu, kernel)

    def doubled(*given: Any) -> Any:
        found = right(*given)
        return (found[0] * 2, *found[1:]) if isinstance(found, tuple | list) else found * 2

    monkeypatch.setattr(torch_npu, kernel, doubled)
    assert [result.ok for result in tried(named)] == [False]


def test_an_operation_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("call aclnnSwiGlu failed, error code is 561002")

    monkeypatch.setattr(torch_npu, "npu_swiglu", refuse)
    [result] = tried("linear with a gate")
    assert not result.ok
    assert result.detail is not None and "561002" in result.detail
