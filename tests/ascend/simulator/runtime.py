"""The simulated runtime as seen from Python: its counters and faults, of this process or of another one.

The libraries are found through LD_LIBRARY_PATH (`tests/ascend/environment.py`).
"""

import ctypes
import mmap
from collections.abc import Callable
from functools import cache
from pathlib import Path

_SLOTS = 64


class Report(ctypes.Structure):
    """As in runtime.h."""

    _fields_ = (
        ("counter", ctypes.c_int64 * _SLOTS),
        ("fault", ctypes.c_int64 * _SLOTS),
        ("message", ctypes.c_char * 1024),
    )


@cache
def library() -> ctypes.CDLL:
    """The runtime that torch_npu of this process uses."""
    found = ctypes.CDLL("libascendcl.so")
    found.fake_report.restype = ctypes.POINTER(Report)
    found.fake_counter_names.restype = found.fake_fault_names.restype = ctypes.c_char_p
    found.fake_take_collective.restype = ctypes.c_void_p
    return found


@cache
def counter_names() -> tuple[str, ...]:
    """Of all counters, in order."""
    return tuple(library().fake_counter_names().decode().split())


@cache
def fault_names() -> tuple[str, ...]:
    """Of all faults, in order."""
    return tuple(library().fake_fault_names().decode().split())


@cache
def own_report() -> Report:
    """Of this process."""
    report: Report = library().fake_report().contents
    return report


def forget_report() -> None:
    """In a process that was forked: it has a report of its own."""
    library().fake_forget_report()
    own_report.cache_clear()


def report_of(folder: Path, pid: int) -> Report:
    """Of another process, which was started with FAKE_NPU_REPORTS=`folder` and has imported torch_npu."""
    with (folder / str(pid)).open("r+b") as file:
        return Report.from_buffer(mmap.mmap(file.fileno(), 0))


def add(name: str, by: int = 1) -> None:
    """Adds to a counter of this process."""
    own_report().counter[_index(name)] += by


@cache
def _index(name: str) -> int:
    return counter_names().index(name)


def take_collective() -> int | None:
    """The next collective that was called while a graph is captured; None for no other one."""
    call: int | None = library().fake_take_collective()
    return call


def repeat_collective(call: int | None) -> int:
    """Makes a collective of a graph again; the status of HCCL, 0 for success."""
    return int(library().fake_repeat_collective(ctypes.c_void_p(call)))


Hook = Callable[[int, int | None, int | None], None]
_HOOK_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_installed: list[object] = []


def set_hook(hook: Hook) -> None:
    """`hook` is called at each step of capturing, updating and replaying a graph (Hook in runtime.h)."""
    function = _HOOK_TYPE(hook)
    _installed[:] = [function]
    library().fake_set_hook(function)
