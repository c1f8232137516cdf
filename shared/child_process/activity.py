"""Whether a process that does not answer is busy or hung, seen from outside: what its threads do by /proc.

A thread is at work that uses a core, waits for one or waits for the disk, however little of a core it gets on a
machine with too much to do. One that sleeps or is stopped (SIGSTOP) is not, nor is one that only wakes now and then (to
answer a probe, to look at a clock). Source of the fields: proc(5) for /proc/[pid]/task/[tid]/stat,
Documentation/scheduler/sched-stats.rst of Linux for schedstat beside it.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

# Running or waiting for a core; waiting for the disk, as for a page of a file.
_AT_WORK = (b"R", b"D")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_OVER_S = 1.0
# Of the time between two looks, at least a second: what threads that only wake now and then stay far below.
_LEAST_RUNNING = 0.05
# Waiting for a core counted too, which on a crowded machine is long for a thread that only wakes as well.
_LEAST_WANTED = 0.25


@dataclass(frozen=True, slots=True)
class _Thread:
    """As one look finds it."""

    is_at_work: bool
    ran_s: float  # on a core
    waited_s: float  # for a core; 0 where the kernel does not count it


_NEW = _Thread(False, 0.0, 0.0)


class ProcessActivity:
    """What the threads of a process did between looks.

    A look should not follow a question to the process directly: the thread that answers is at work then.
    """

    def __init__(self, pid: int, over_s: float = _OVER_S) -> None:
        """`over_s`: the least time between looks that are compared, in seconds."""
        self._folder = Path(f"/proc/{pid}/task")
        self._over_s = over_s
        self._looked_at = time.monotonic()
        self._seen = self._first = self._threads()
        self._is_busy = True

    @property
    def used_since_s(self) -> float:
        """Processor time in seconds of the thread that has used most from the first look to the last."""
        grown = (t.ran_s - self._first.get(name, _NEW).ran_s for name, t in self._seen.items())
        return max(grown, default=0.0)

    def is_busy(self) -> bool:
        """Whether a thread was at work between the last two looks that are far enough apart; yes before there are
        two, no for a process that has ended."""
        elapsed = time.monotonic() - self._looked_at
        if elapsed >= self._over_s:
            threads = self._threads()
            self._is_busy = any(
                _was_at_work(self._seen.get(name, _NEW), thread, elapsed)
                for name, thread in threads.items()
            )
            self._seen = threads
            self._looked_at += elapsed
        return self._is_busy

    def _threads(self) -> dict[str, _Thread]:
        """Each thread by its number."""
        found = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    found[name] = _look(self._folder / name)
        return found


def _look(thread: Path) -> _Thread:
    # The name before them may contain blanks and parentheses.
    fields = (thread / "stat").read_bytes().rpartition(b")")[2].split()
    is_at_work = fields[0] in _AT_WORK
    try:
        # Nanoseconds on a core, nanoseconds of waiting for one, time slices.
        ran_ns, waited_ns, _ = (thread / "schedstat").read_bytes().split()
    except (OSError, ValueError):  # a kernel that does not count them
        return _Thread(is_at_work, _TICK_S * (int(fields[11]) + int(fields[12])), 0.0)
    return _Thread(is_at_work, int(ran_ns) / 1e9, int(waited_ns) / 1e9)


def _was_at_work(before: _Thread, after: _Thread, elapsed_s: float) -> bool:
    ran, waited = after.ran_s - before.ran_s, after.waited_s - before.waited_s
    return (
        ran >= _LEAST_RUNNING * elapsed_s
        or ran + waited >= _LEAST_WANTED * elapsed_s
        # Of a thread that gets no core at all nothing grows; nor does it of one that reads from a disk.
        or (before.is_at_work and after.is_at_work)
    )
