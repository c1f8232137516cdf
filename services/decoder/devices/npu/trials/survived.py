"""What may leave a device useless for its process, or end it, is not tried again by the next one.

A process that begins with it locks a file of its own, and removes it at the end. A file that nobody locks is that of a
process that did not come so far. Where no file can be written there is none.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.decoder.devices.npu.trials.kept_trials import place_of

_SUFFIX = ".begun"


def has_ended(what: str) -> bool:
    """Whether a process did not come to the end of it."""
    return any(not _is_locked(path) for path in _files(what))


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """This process is in it. That it comes to its end is the end of all that did not."""
    held, own = -1, ""
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        place = place_of(what)
        place.parent.mkdir(parents=True, exist_ok=True)
        held, own = tempfile.mkstemp(_SUFFIX, f"{place.name}.", place.parent)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield
        for path in _files(what):
            if str(path) == own or not _is_locked(path):
                path.unlink(missing_ok=True)
    finally:
        if held >= 0:
            os.close(held)


def _files(what: str) -> list[Path]:
    with suppress(OSError, RuntimeError):
        place = place_of(what)
        return list(place.parent.glob(f"{place.name}.*{_SUFFIX}"))
    return []


def _is_locked(path: Path) -> bool:
    try:
        other = os.open(path, os.O_RDWR)
    except OSError:  # it is gone
        return True
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(other)
    return False
