"""Jobs done in confined processes, which hold no more than so much memory and time.

The processes are kept: a small job takes a tenth of a millisecond more than in this process. One that goes beyond its
bounds ends, costs the job that it did, and the next job starts another.
"""

import contextlib
import json
import marshal
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import structlog

from shared.confinement.messages import LENGTHS, NO_MEMORY
from shared.errors import Unavailable
from shared.settings import bare_environment

log = structlog.get_logger(__name__)

# Of real time, for one that waits: nothing in a job can. On a busy machine processor time takes longer.
_REAL_S = 60.0
_TRIES = 2
_BUFFER_BYTES = 1 << 20  # a conversation goes over in one piece; the system may allow less
# Signals from outside, as of the kernel when memory is short: no fault of the job.
_BY_OTHERS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}


class JobLimit(Exception):
    """A job went beyond its bounds; the message says of what, as "took more than 512 MB of memory"."""

    def __init__(self, message: str, *, is_time: bool = False) -> None:
        super().__init__(message)
        self.is_time = is_time  # too much processor time


@dataclass(frozen=True, slots=True)
class Work:
    """What processes do: the module that runs in each (its argument is `memory_bytes`, and it calls `answer_jobs`),
    what it works on for messages, the reason of errors about the process itself, and the bounds.
    """

    module: str
    what: str  # "chat templates"
    reason: str  # "TEMPLATE_PROCESS"
    memory_bytes: int  # beside the process's own
    processor_s: int  # of each job


class ConfinedProcesses:
    """As many processes as jobs are done at a time. Safe for several threads. Enter it, to end them."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
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
        data = marshal.dumps(
            dict(job)
        )  # a tenth of the time of JSON; its reader is the confined one
        for attempt in range(_TRIES):
            process = self._take()
            keep = False
            try:
                answer, text = process.ask(data, self._work.processor_s)
                keep = not answer["last"]
            except TimeoutError:
                raise JobLimit(f"took over {_REAL_S:g} s") from None
            except _Died as died:
                if died.status in _BY_OTHERS and attempt + 1 < _TRIES and not self._closed:
                    continue
                raise self._reason(died.status) from None
            finally:
                self._give_back(process, keep)
            return answer, text
        raise AssertionError("the last attempt returns or raises")

    def _reason(self, status: int) -> Exception:
        if self._closed:
            return _stopping()
        log.warning("confined process lost", work=self._work.what, status=status)
        if status == NO_MEMORY:
            return JobLimit(f"took more than {self._work.memory_bytes >> 20} MB of memory")
        if status == -signal.SIGXCPU:
            return JobLimit(f"took over {self._work.processor_s} s of processor time", is_time=True)
        if status in _BY_OTHERS:
            return Unavailable(
                self._work.reason, f"the process for {self._work.what} was ended; retry"
            )
        return JobLimit(f"ended its process (status {status})")

    def _take(self) -> "_Process":
        with self._lock:
            if self._closed:
                raise _stopping()
            if self._idle:
                return self._idle.pop()
        process = _Process(self._work)
        with self._lock:
            closed = self._closed
            if not closed:
                self._all.add(process)
        if closed:
            process.stop()
            raise _stopping()
        self._say_missing(process.missing)
        return process

    def _give_back(self, process: "_Process", keep: bool) -> None:
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


class _Died(Exception):
    """The process has ended, with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


class _Process:
    """One process and the socket to it, for one thread at a time."""

    def __init__(self, work: Work) -> None:
        """Raises Unavailable where it does not start."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_REAL_S)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", work.module, str(work.memory_bytes)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=bare_environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path)),
                start_new_session=True,  # a terminal's Ctrl-C is handled by the service
            )
        self._processor_s = 0.0  # as last reported
        try:
            self.missing: list[str] = self._receive()[0]["missing"]
        except (_Died, TimeoutError) as error:
            self.stop()
            raise Unavailable(
                work.reason,
                f"the process for {work.what} does not start; its own message stands above",
            ) from error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, data: bytes, processor_s: int) -> tuple[dict[str, Any], str]:
        """Its answer to a job and the text with it. Raises _Died, TimeoutError."""
        self._allow(processor_s)
        try:
            self._socket.sendall(LENGTHS.pack(len(data), 0) + data)
        except (ConnectionError, ValueError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise _Died(self._status()) from error
        return self._receive()

    def stop(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self) -> tuple[dict[str, Any], str]:
        head, body = LENGTHS.unpack(self._exactly(LENGTHS.size))
        data = self._exactly(head + body)
        answer = json.loads(data[:head])
        self._processor_s = answer["processor_s"]
        return answer, str(memoryview(data)[head:], "utf-8", "surrogatepass")

    def _exactly(self, count: int) -> bytes:
        pieces = []
        while count:
            try:
                piece = self._socket.recv(min(count, 1 << 20))
            except TimeoutError:
                raise
            except OSError as error:
                raise _Died(self._status()) from error
            if not piece:
                raise _Died(self._status())
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def _status(self) -> int:
        """Its exit status, once it has closed its end."""
        return self._process.wait()

    def _allow(self, seconds: int) -> None:
        """Sets a processor time after which the kernel ends it, in the whole seconds that the kernel counts."""
        most = math.ceil(self._processor_s) + seconds
        with contextlib.suppress(OSError, ValueError):
            hard = resource.prlimit(self.pid, resource.RLIMIT_CPU)[1]
            resource.prlimit(self.pid, resource.RLIMIT_CPU, (most, hard))


def _stopping() -> Unavailable:
    return Unavailable("SHUTTING_DOWN", "this service is stopping; retry elsewhere")
