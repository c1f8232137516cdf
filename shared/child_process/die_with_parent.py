"""Makes a child process end when its parent process does, however that ends."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: loading a library in a forked child of a process with threads may hang.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(
    number: signal.Signals = signal.SIGKILL, niceness: int = 0, parent: int | None = None
) -> Callable[[], None]:
    """Returns a `preexec_fn` by which the kernel sends the child process signal `number` when its parent ends;
    `niceness` is added to the parent's; `parent` is this process unless given.

    The kernel means the end of the *thread* that started the child process, so it has to be the main thread.
    Source: prctl(2), PR_SET_PDEATHSIG (Linux).
    """
    parent = parent or os.getpid()

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it ended between fork and prctl
            os._exit(1)
        if niceness:
            os.nice(niceness)

    return prepare
