"""A seccomp filter for confined processes: a small program that the kernel runs at each system call.

Calls that are not in `system_calls` fail with EPERM, so that a library which tries one goes on without it.
A call by another machine's numbers (32-bit calls on x86-64) kills the process.
"""

import ctypes
import errno
import os
import platform
import struct

from shared.confinement.system_calls import MACHINES, Machine

# Classic BPF, as the kernel takes it: code, jumps if true and if false, operand.
Program = list[tuple[int, int, int, int]]

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS: 32 bits of struct seccomp_data
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # places in struct seccomp_data

ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
KILL = 0x80000000

_PROT_EXEC = 4
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1


class NoSeccomp(Exception):
    """This kernel or machine does not support the filter; the message gives the reason."""


def worker_filter(machine: Machine, pid: int) -> Program:
    """What process `pid` may still call."""
    program: Program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in machine.allowed:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, ALLOW)]
    for number in machine.memory:
        protection = _ARGUMENTS + 8 * 2  # the lower half: both machines are little-endian
        program += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, protection),
            (_ANY_BIT, 0, 1, _PROT_EXEC),
            (_RETURN, 0, 0, REFUSE),
            (_RETURN, 0, 0, ALLOW),
        ]
    program += [
        (_EQUAL, 0, 3, machine.tgkill),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_EQUAL, 0, 1, pid),
        (_RETURN, 0, 0, ALLOW),
        (_RETURN, 0, 0, REFUSE),
    ]
    return program


def install() -> None:
    """Puts the filter over all threads of this process, for good. Raises NoSeccomp."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        raise NoSeccomp(f"there is no table of system calls for {platform.machine()}")
    program = worker_filter(machine, os.getpid())
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: how many instructions, and where.
    described = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise NoSeccomp(f"no_new_privs: {os.strerror(ctypes.get_errno())}")
    failed = libc.syscall(ctypes.c_long(machine.seccomp), _SET_MODE_FILTER, _ALL_THREADS, described)
    if failed:  # -1, or the thread that cannot have it
        raise NoSeccomp(f"the kernel refuses it: {os.strerror(ctypes.get_errno())}")
