"""Landlock: a process gives up opening files, and TCP, for good. Needs no privileges; Linux 5.13 and newer.

Used beside the seccomp filter, or alone where that is not available.
"""

import ctypes
import os
import struct

# The same numbers on every machine.
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_ASK_VERSION = 1
_PR_SET_NO_NEW_PRIVS = 38

# Every right over files and TCP that each version of the kernel's interface knows how to take.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP_SINCE, _TCP_RIGHTS = 4, 0b11
_SCOPES_SINCE, _SCOPES = 6, 0b11  # abstract unix sockets and signals of others


class NoLandlock(Exception):
    """This kernel does not support it; the message gives the reason."""


def install() -> int:
    """Takes every right away from this thread and those that it starts.

    Returns the version of the kernel's interface: from 4 on TCP is gone too, from 6 on signals to
    others. Raises NoLandlock.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.syscall
    version: int = call(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), _ASK_VERSION)
    if version < 1:
        raise NoLandlock(os.strerror(ctypes.get_errno()))
    files = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    fields = [files]
    if version >= _TCP_SINCE:
        fields.append(_TCP_RIGHTS)
    if version >= _SCOPES_SINCE:
        fields.append(_SCOPES)
    rules = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = call(ctypes.c_long(_CREATE_RULESET), rules, ctypes.c_size_t(len(rules)), 0)
    if ruleset < 0:
        raise NoLandlock(os.strerror(ctypes.get_errno()))
    try:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if call(ctypes.c_long(_RESTRICT_SELF), ruleset, 0):
            raise NoLandlock(os.strerror(ctypes.get_errno()))
    finally:
        os.close(ruleset)
    return version
