"""Tests on the simulated NPU. They are collected in its environment alone (`make test-npu`)."""

import os
from collections.abc import Iterator

import pytest

IS_SIMULATED = "FAKE_NPU_SOC" in os.environ
collect_ignore_glob = [] if IS_SIMULATED else ["test_*.py", "*/test_*.py"]

if IS_SIMULATED:
    import torch
    import torch_npu

    from services.decoder.devices.npu.trials import trials
    from shared.hardware import operation_check
    from tests.ascend.simulator import counters, faults, runtime, streams


@pytest.fixture(autouse=True, scope="session")
def _trials_are_short() -> Iterator[None]:
    """Processes of their own for each form would take most of the time here; those that tests start have them
    (`decoder/test_trials.py`). What an operation takes is timed by a single call, for no time means anything here."""
    with pytest.MonkeyPatch.context() as patched:
        if IS_SIMULATED:
            patched.setattr(trials, "apart_or_here", trials.here)
            patched.setattr(operation_check, "_REPEATS", 1)
        yield


@pytest.fixture(autouse=True)
def _device_is_sound(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing is planted or pending, no host memory has changed under a copy, no streams have used the
    same memory in no order, no copy that was to wait for nothing waited since its host memory is not pinned, and every
    op had a kernel of its own; a test with the marker `finds_faults` looks at these itself."""
    torch.set_num_threads(1)
    counters.fallbacks.clear()
    counters.on_ai_cpu.clear()
    before = counters.counts()
    yield
    faults.clear()
    torch_npu.npu.synchronize()
    found = counters.counts()
    problem = counters.fault_found()
    streams.forget_found()
    runtime.own_report().message = b""
    if request.node.get_closest_marker("finds_faults") is None:
        for name in ("host_memory_changed", "unordered"):
            assert found[name] == before[name], problem
        for name in ("copy_h2d_pageable", "copy_d2h_pageable"):
            assert found[name] == before[name], "copies with host memory that is not pinned"
        assert not counters.fallbacks, "ops without a kernel for the NPU"
        assert not counters.on_ai_cpu, "ops with a dtype that the NPU's cores do not take"
