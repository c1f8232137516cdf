"""Jobs done in confined processes, which hold no more than so much memory and time.

The processes are kept: a small job takes a tenth of a millisecond more than in this process. One that goes beyond its
bounds ends, costs the job that it did, and the next job starts another.
"""

import marshal
import signal
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import structlog

from shared.confinement.messages import NO_MEMORY
from shared.confinement.process import Died, Process
from shared.confinement.work import JobLimit, Work
from shared.errors import Unavailable

log = structlog.get_logger(__name__)

_TRIES = 2
# Signals from outside, as of the kernel when memory is short: no fault of the job.
_BY_OTHERS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}


class ConfinedProcesses:
    """As many processes as jobs are done at a time. Safe for several threads. Enter it, to end them."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._closed = False
        self._said_missing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; who waits for one gets Unavailable."""
        with self._lock:
            self._closed = True
            processes, self._all, self._idle = self._all, set(), []
        for process in processes:
            process.stop()

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        with self._lock:
            return [process.pid for process in self._all]

    def ask(self, job: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The values and the text that a job gives. Its own must be what `marshal` has.

        Raises JobLimit, and Unavailable where no process can be had.
        """
        # A tenth of the time of JSON; its reader is the confined one.
        data = marshal.dumps(dict(job))
        for attempt in range(_TRIES):
            process = self._take(fresh=attempt > 0)
            keep = False
            try:
                answer, text = process.ask(data)
                keep = not answer["last"]
            except TimeoutError:
                raise JobLimit(f"took over {self._work.real_s:g} s", is_time=True) from None
            except Died as died:
                if died.status in _BY_OTHERS and attempt + 1 < _TRIES and not self._closed:
                    continue
                raise self._reason(died.status) from None
            finally:
                self._give_back(process, keep)
            return answer, text
        raise AssertionError("the last attempt returns or raises")

    def _reason(self, status: int | None) -> Exception:
        if self._closed:
            return _stopping()
        log.warning("confined process lost", work=self._work.what, status=status)
        if status is None:
            return JobLimit("broke its process")
        if status == NO_MEMORY:
            return JobLimit(f"took more than {self._work.memory_bytes >> 20} MB of memory")
        if status == -signal.SIGXCPU:
            return JobLimit(f"took over {self._work.processor_s} s of processor time", is_time=True)
        if status in _BY_OTHERS:
            return Unavailable(
                self._work.reason, f"the process for {self._work.what} was ended; retry"
            )
        return JobLimit(f"ended its process (status {status})")

    def _take(self, *, fresh: bool) -> Process:
        """A process that waits, or a new one; with `fresh` a new one in place of one that waits: it may have met
        what ended another a moment ago.
        """
        with self._lock:
            if self._closed:
                raise _stopping()
            ended = [process for process in self._idle if process.has_ended]
            self._idle = [process for process in self._idle if process not in ended]
            process = self._idle.pop() if self._idle else None
            if process is not None and fresh:
                ended.append(process)
                process = None
            self._all.difference_update(ended)
        for lost in ended:
            lost.stop()
        if process is not None:
            return process
        process = Process(self._work)
        with self._lock:
            closed = self._closed
            if not closed:
                self._all.add(process)
        if closed:
            process.stop()
            raise _stopping()
        self._say_missing(process.missing)
        return process

    def _give_back(self, process: Process, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed:
                self._idle.append(process)
                return
            self._all.discard(process)
        process.stop()

    def _say_missing(self, missing: list[str]) -> None:
        if missing and not self._said_missing:
            self._said_missing = True
            log.warning(
                f"{self._work.what} are processed without all layers of confinement",
                missing=missing,
            )


def _stopping() -> Unavailable:
    return Unavailable("SHUTTING_DOWN", "this service is stopping; retry elsewhere")
