"""Faults that a test plants in the simulated device, in its own process or in another one."""

import os
from pathlib import Path

import pytest
import torch
import torch_npu

from tests.ascend.simulator import faults, runtime


def test_behind_a_kernel_that_fails_every_call_of_the_process_does() -> None:
    x = torch.ones(4, device="npu")
    faults.plant(kernel_in=2)
    y = x + 1
    calls = (lambda: y * 2, lambda: x + 1, torch_npu.npu.synchronize)
    for call in calls:
        with pytest.raises(RuntimeError, match="507015"):
            call()
    faults.clear()
    assert (y * 2).tolist() == [4] * 4


def test_a_kernel_runs_out_of_memory() -> None:
    x = torch.ones(4, device="npu")
    faults.plant(kernel_in=1, kernel_error=faults.KERNEL_RUNS_OUT_OF_MEMORY)
    with pytest.raises(torch.OutOfMemoryError):
        x + 1


def test_a_kernel_loses_the_device() -> None:
    x = torch.ones(4, device="npu")
    faults.plant(kernel_in=1, kernel_error=faults.KERNEL_LOSES_DEVICE)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="507010"):
            x + 1


def test_faults_of_another_process_are_planted_in_its_file(tmp_path: Path) -> None:
    (tmp_path / str(os.getpid())).write_bytes(bytes(runtime.own_report()))
    faults.plant(runtime.report_of(tmp_path, os.getpid()), lost=1)
    again = runtime.report_of(tmp_path, os.getpid())
    assert again.fault[runtime.fault_names().index("lost")] == 1
