"""Whether a process that does not answer is busy or hung, seen from outside: what its threads do by /proc.

A thread that runs, waits for a core or waits for the disk is at work, however little of a core it gets. One that sleeps
or is stopped (SIGSTOP) is not, unless it has used a share of a core meanwhile. Source of the fields: proc(5),
/proc/[pid]/task/[tid]/stat.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

# Running or waiting for a core; waiting for the disk, as for a page of a file.
_AT_WORK = (b"R", b"D")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Of a core, over at least a second: what threads use that only answer probes or wake now and then is far less.
_LEAST_SHARE = 0.05
_OVER_S = 1.0


class ProcessActivity:
    """What the threads of a process did between looks.

    A look should not follow a question to the process directly: the thread that answers is at work then.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked_at = time.monotonic()
        self._used = {thread: used for thread, _, used in self._threads()}
        self._is_busy = True

    @property
    def used_s(self) -> float:
        """Processor time in seconds of the thread that has used most, as of the last look."""
        return max(self._used.values(), default=0.0)

    def is_busy(self) -> bool:
        """Whether a thread is at work now, or has used a share of a core since the last look that was a second ago; no
        for a process that has ended."""
        threads = list(self._threads())
        now = time.monotonic()
        elapsed = now - self._looked_at
        if elapsed >= _OVER_S:
            grown = (used - self._used.get(thread, 0.0) for thread, _, used in threads)
            self._is_busy = max(grown, default=0.0) >= _LEAST_SHARE * elapsed
            self._used = {thread: used for thread, _, used in threads}
            self._looked_at = now
        return self._is_busy or any(state in _AT_WORK for _, state, _ in threads)

    def _threads(self) -> Iterator[tuple[str, bytes, float]]:
        """Number, state and processor time in seconds of each thread."""
        folder = Path(f"/proc/{self._pid}/task")
        with contextlib.suppress(OSError):
            for thread in os.listdir(folder):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    # The name before them may contain blanks and parentheses.
                    fields = (folder / thread / "stat").read_bytes().rpartition(b")")[2].split()
                    yield thread, fields[0], _TICK_S * (int(fields[11]) + int(fields[12]))
