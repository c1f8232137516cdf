"""Confinement of a process before it reads what nobody vouches for: no files, network or processes, limited memory.

Three layers. A seccomp filter leaves it the system calls of `system_calls` alone. Landlock takes away
files and TCP a second time. Limits of the kernel bound its memory, the size of what it writes, and how
many files it holds. The processor time of each job is bounded from outside, by the process that gives it.

Where a kernel or machine has no seccomp filter, Landlock and the limits remain, with a network
namespace of its own for the worker where the kernel gives one; `Confinement.missing` says what is
not in force.
"""

import contextlib
import ctypes
import os
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path

from shared.confinement import landlock, seccomp

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


@dataclass
class Confinement:
    """The layers in force, and those missing with their reasons."""

    layers: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def confine(memory_bytes: int, file_bytes: int, use_seccomp: bool = True) -> Confinement:
    """Confines this process for good. It must have imported everything that it needs, and have no threads.

    It may take `memory_bytes` more memory than it has, and write files of `file_bytes` that are
    handed to it open. `use_seccomp` False is for testing the other layers.
    """
    found = Confinement()
    _limit(memory_bytes, file_bytes)
    found.layers.append("limits")
    try:
        version = landlock.install()
        found.layers.append(f"landlock {version}")
    except landlock.NoLandlock as error:
        found.missing.append(f"Landlock: {error}")
    try:
        if not use_seccomp:
            raise seccomp.NoSeccomp("not wanted")
        seccomp.install()
        found.layers.append("seccomp")
    except seccomp.NoSeccomp as error:
        found.missing.append(f"seccomp: {error}")
        _leave_the_network(found)
    return found


def _limit(memory_bytes: int, file_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + memory_bytes
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, highest + 2),  # the one artifact that is written
        (resource.RLIMIT_NPROC, 0),  # does not apply to root
    ):
        hard = resource.getrlimit(limit)[1]
        least = min(value, sys.maxsize if hard == resource.RLIM_INFINITY else hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (least, least))


def _leave_the_network(found: Confinement) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        found.layers.append("network namespace")
    else:
        found.missing.append(f"network namespace: {os.strerror(ctypes.get_errno())}")
