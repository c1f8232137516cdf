"""What a process tells on SIGUSR2; one answer is a report of its memory and objects, for finding leaks."""

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SIGNAL = signal.SIGUSR2


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_answers: list[Callable[[], None]] = []


@contextmanager
def answering(answer: Callable[[], None]) -> Iterator[None]:
    """Inside of it each SIGUSR2 calls `answer`, after those of the blocks around it. It runs in the event loop, so that
    no task is interrupted halfway.
    """
    loop = asyncio.get_running_loop()
    _answers.append(answer)
    loop.add_signal_handler(SIGNAL, _answer)
    try:
        yield
    finally:
        _answers.remove(answer)
        if not _answers:
            loop.remove_signal_handler(SIGNAL)


def _answer() -> None:
    for answer in list(_answers):
        answer()


def report() -> dict[str, object]:
    """The report, after a full collection.

    rss_bytes: resident memory; used_bytes: the same when what is free has gone back to the system;
    malloc_bytes: what the C library has given out, to Python's larger objects too; blocks: Python's smaller
    objects, of all types; types: how many objects there are of each type that the collector knows, without those that
    existed when the service had loaded.
    """
    gc.collect()
    kinds = Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())
    rss_bytes = _rss_bytes()
    library = ctypes.CDLL(None)
    library.malloc_trim(0)
    library.mallinfo2.restype = _MallInfo
    info = library.mallinfo2()
    return {
        "rss_bytes": rss_bytes,
        "malloc_bytes": info.uordblks + info.hblkhd,
        "used_bytes": _rss_bytes(),
        "blocks": sys.getallocatedblocks(),
        "types": dict(kinds.most_common()),
    }


def write_report(folder: Path) -> None:
    """Writes `report()` to `folder/PID.json`, atomically."""
    path = folder / f"{os.getpid()}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report()))
    part.replace(path)


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
