"""Ends Python code that takes too long in a thread, such as a template that loops.

The exception comes at the next instruction of Python; a single long call into C is not cut short.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

_LOOK_S = 0.1

_deadlines: dict[int, float] = {}  # by thread, in seconds of the monotonic clock
_wanted = threading.Event()
_starting = threading.Lock()
_watch: threading.Thread | None = None


class TimeIsUp(BaseException):
    """Raised in the code. Not an `Exception`: code that handles those must not go on."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeIsUp in the block when it takes longer. Not to be nested."""
    thread = threading.get_ident()
    _deadlines[thread] = time.monotonic() + seconds
    _start_watch()
    _wanted.set()
    try:
        yield
    except TimeIsUp:
        raise
    except BaseException:
        _settle(thread)
        raise
    _settle(thread)


def _settle(thread: int) -> None:
    """Removes the deadline, or waits for the exception if the watchdog has removed it."""
    if _deadlines.pop(thread, None) is None:
        while True:
            time.sleep(0.001)


def _start_watch() -> None:
    global _watch
    with _starting:
        if _watch is None or not _watch.is_alive():
            _watch = threading.Thread(target=_look, name="time limit", daemon=True)
            _watch.start()


def _look() -> None:
    while True:
        _wanted.wait()
        time.sleep(_LOOK_S)
        now = time.monotonic()
        for thread, deadline in list(_deadlines.items()):
            if deadline < now and _deadlines.pop(thread, None) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(TimeIsUp)
                )
        if not _deadlines:
            _wanted.clear()
            if _deadlines:  # one came in between
                _wanted.set()
