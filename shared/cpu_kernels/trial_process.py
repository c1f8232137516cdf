"""Tries libraries of CPU kernels in a process of its own: `admit` asks each whether it may be used, `measure` times it.

What it says goes to standard output as JSON. Each library is first called in a fork, since instructions that a system
shows but does not give end the process, and a second of the processor's time ends one that never comes back. It is
started as a program of its own (`trial.py`), never imported: only the standard library, nothing of ours.
"""

import contextlib
import ctypes
import json
import mmap
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import partial
from typing import Any

_ADMIT_S, _MEASURE_S = 1, 20  # of processor time
_WALL_TIMES = 30  # as many seconds may pass for each of them on a busy machine
# One layer of bfloat16: 2 MB of weights, many of them one after the other, so that no core's own cache has them.
_INPUTS, _OUTPUTS, _LAYERS = 896, 1152, 32
# Rows of x, and how many layers one timing takes.
_PASSES = {263: 1, 4: 8, 1: 8}
_ROUNDS = 5


def main() -> None:
    """`admit` or `measure`, then name and path of each library in turn."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    what, *told = sys.argv[1:]
    libraries = dict(zip(told[::2], told[1::2], strict=True))
    found = {"admit": _admit_each, "measure": _measure}[what](libraries)
    json.dump(found, sys.stdout)


def _admit_each(libraries: dict[str, str]) -> dict[str, Any]:
    """Of each library what `tessera_admit` returns, as `_apart` says it."""
    return {name: _apart(partial(_admit, path), _ADMIT_S) for name, path in libraries.items()}


def _admit(path: str) -> int:
    code: int = ctypes.CDLL(path).tessera_admit()
    return code


def _measure(libraries: dict[str, str]) -> dict[str, Any]:
    """Of each library the least seconds for a layer by the number of rows, as `_apart` says it."""
    together = _apart(partial(_take_turns, libraries), _MEASURE_S)
    if "value" in together:
        return {name: {"value": times} for name, times in together["value"].items()}
    found = {}
    for name, path in libraries.items():  # one of them ends the process: which?
        alone = _apart(partial(_take_turns, {name: path}), _MEASURE_S)
        found[name] = {"value": alone["value"][name]} if "value" in alone else alone
    return found


def _take_turns(libraries: dict[str, str]) -> dict[str, dict[int, float]]:
    """Name -> rows -> seconds: the least of some turns, by the thread's own time, so that other work shows little."""
    size = 2 * _INPUTS * _OUTPUTS
    weights = _filled(_LAYERS * size)
    most = max(_PASSES)
    x, y = _filled(2 * most * _INPUTS), _filled(2 * most * _OUTPUTS)
    opened = {name: _open(path) for name, path in libraries.items()}
    least = {name: dict.fromkeys(_PASSES, float("inf")) for name in libraries}
    layer = 0
    for _ in range(_ROUNDS):
        for rows, passes in _PASSES.items():
            for name, linear in opened.items():
                began = time.thread_time()
                for _ in range(passes):
                    linear(weights + layer * size, _INPUTS, _OUTPUTS, x, y, rows)
                    layer = (layer + 1) % _LAYERS
                seconds = (time.thread_time() - began) / passes
                least[name][rows] = min(least[name][rows], seconds)
    return least


def _open(path: str) -> Callable[..., None]:
    """The linear layer of a library, on one thread."""
    library = ctypes.CDLL(path)
    if code := library.tessera_admit():
        raise OSError(f"tessera_admit returns {code}")
    library.tessera_start(1)
    linear = library.tessera_try_linear
    linear.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64)
    linear.restype = None
    return linear


_memories: list[mmap.mmap] = []


def _filled(size: int) -> int:
    """The address of so many bytes of bfloat16 numbers of magnitude 0.03 to 0.06, in huge pages if there are any."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _memories.append(memory)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    some = bytearray(random.Random(0).randbytes(1 << 16))
    signs = bytes(0x3D if value < 128 else 0xBD for value in range(256))
    some[1::2] = some[1::2].translate(signs)
    for start in range(0, size, len(some)):
        memory[start : start + len(some)] = some[: size - start]
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _apart(work: Callable[[], Any], limit_s: int) -> dict[str, Any]:
    """What `work` returns in a fork of this process, as `value`; else the `signal` that ended it, or its `error`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(reading)
            for ending in (signal.SIGPROF, signal.SIGALRM):  # whatever was inherited
                signal.signal(ending, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [ending])
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            signal.alarm(limit_s * _WALL_TIMES)
            try:
                said: dict[str, Any] = {"value": work()}
            except Exception as error:
                said = {"error": str(error)}
            os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said_by_child = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"signal": signal.Signals(os.WTERMSIG(status)).name}
    found: dict[str, Any] = json.loads(said_by_child or '{"error": "it says nothing"}')
    return found


if __name__ == "__main__":
    main()
