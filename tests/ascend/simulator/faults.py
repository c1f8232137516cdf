"""Faults that a test plants: an allocation that fails, a kernel that fails, a device that is lost."""

import os
from collections.abc import Iterable
from functools import cache

import torch

from tests.ascend.simulator.runtime import Report, fault_names, own_report

# Values of `kernel_error`.
KERNEL_FAILS, KERNEL_RUNS_OUT_OF_MEMORY, KERNEL_LOSES_DEVICE = range(3)
_CRASHED = 134  # the status of a process that aborts


def plant(report: Report | None = None, **faults: int) -> None:
    """Plants faults in this process, or in that of a `report_of`; 0 takes one back.

    malloc_in, malloc_failures: from that allocation on (1: the next) so many fail; kernel_in: that kernel fails,
    kernel_error: how; lost: the device does not answer any more; faulted: a kernel of this process failed, and so does
    every later call.
    """
    values = (own_report() if report is None else report).fault
    for name, value in faults.items():
        values[fault_names().index(name)] = value


def clear() -> None:
    """Takes back all that was planted in this process."""
    for name in fault_names():
        own_report().fault[fault_names().index(name)] = 0


_names = fault_names()
_KERNEL_IN, _KERNEL_ERROR, _LOST, _FAULTED = map(
    _names.index, ("kernel_in", "kernel_error", "lost", "faulted")
)


@cache
def _named(variable: str) -> frozenset[str]:
    """Kernels that fail, or end the process, wherever they are called: `operator`, or `operator:argument`."""
    return frozenset(filter(None, os.environ.get(variable, "").split(",")))


def before_kernel(name: str, given: Iterable[object]) -> None:
    """Raises what was planted for this call with these arguments."""
    values = own_report().fault
    if values[_FAULTED]:
        _fail(name, KERNEL_FAILS)
    faulting, crashing = _named("FAKE_NPU_FAULTING"), _named("FAKE_NPU_CRASHING")
    if faulting or crashing:
        calls = {name, *(f"{name}:{value}" for value in given if isinstance(value, str))}
        if calls & crashing:
            os._exit(_CRASHED)
        if calls & faulting:
            _fail(name, KERNEL_FAILS)
    if values[_KERNEL_IN]:
        values[_KERNEL_IN] -= 1
        if not values[_KERNEL_IN]:
            _fail(name, values[_KERNEL_ERROR])
    if values[_LOST]:
        raise RuntimeError(
            f"call aclnn{name} failed, detail: EE9999: the heartbeat of the device is lost, 507010"
        )


def _fail(name: str, error: int) -> None:
    if error == KERNEL_RUNS_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"NPU out of memory. Tried to allocate for {name}")
    if error == KERNEL_LOSES_DEVICE:
        own_report().fault[_LOST] = 1
        return
    own_report().fault[_FAULTED] = 1
    raise RuntimeError(
        f"call aclnn{name} failed, detail: EZ9999: The error from device(0), an exception occurred during AICORE "
        "execution, error code is 507015"
    )
