"""Errors of CANN and torch_npu are said with their cause and what helps."""

import pytest
import torch

from services.decoder.devices.npu.errors import explain, find_cause, translate
from shared.errors import Overloaded, Unavailable


@pytest.mark.parametrize(
    ("text", "reason", "helps"),
    [
        (
            "NPU out of memory. Tried to allocate 23.00 GiB",
            "NPU_OUT_OF_MEMORY",
            "--gpu-memory-util",
        ),
        ("rtMalloc execution failed, 207001", "NPU_OUT_OF_MEMORY", "--npu-reserved-memory"),
        ("EL0009: stream resource insufficient, 207008", "NPU_STREAMS_EXHAUSTED", "without graphs"),
        ("aclnnFusedInferAttentionScoreV3 failed, error 561002", "NPU_KERNEL_REFUSED", "doctor"),
        (
            "exception during AICORE execution, error code is 507015",
            "NPU_KERNEL_FAILED",
            "BLOCKING",
        ),
        ("the heartbeat of the device is lost, 507010", "NPU_LOST", "npu-smi"),
        ("EI0006: Getting socket times out", "NPU_RANKS_NOT_CONNECTED", "HCCL_CONNECT_TIMEOUT"),
        ("EJ0001: failed to initialize the HCCP process", "NPU_RANKS_NOT_CONNECTED", "ten seconds"),
        ("libhccl.so: cannot open shared object file", "NPU_LIBRARIES_MISSING", "ascend-toolkit"),
        ("OSError: libatb.so: undefined symbol: _ZN3atb", "NPU_LIBRARIES_MISSING", "nnal"),
        ("EC0010: No module named 'decorator'", "NPU_LIBRARIES_MISSING", "'.[npu]'"),
        ("ACL_PRECISION_MODE, error code is 500001", "NPU_LIBRARIES_MISSING", "numpy 1"),
        ("self not implemented for DT_BFLOAT16", "UNSUPPORTED_DTYPE", "--dtype float16"),
    ],
)
def test_what_is_known_of_an_error_is_said(text: str, reason: str, helps: str) -> None:
    error = translate(RuntimeError(f"call failed\n[ERROR] {text}"))
    assert error is not None
    assert error.reason == reason
    assert helps in error.message


def test_who_may_try_again_is_told() -> None:
    assert isinstance(translate(torch.OutOfMemoryError("NPU out of memory")), Overloaded)
    assert isinstance(translate(RuntimeError("error code is 507010")), Unavailable)


def test_what_is_not_known_stays_as_it_is() -> None:
    error = RuntimeError("shapes do not fit\nat line 5")
    assert find_cause(error) is None
    assert translate(error) is None
    assert explain(error) == "shapes do not fit"
