"""One confined process and the conversation with it. What it says is not trusted: a job may have taken it over."""

import contextlib
import json
import math
import os
import resource
import socket
import subprocess
import sys
import time
from typing import Any

import structlog

from shared.confinement.messages import LENGTHS
from shared.confinement.work import JobLimit, Work
from shared.errors import Unavailable
from shared.settings import bare_environment

log = structlog.get_logger(__name__)

_START_S = 60.0
_BUFFER_BYTES = 1 << 20  # a conversation goes over in one piece; the system may allow less
_PIECE_BYTES = 1 << 20


class Died(Exception):
    """The process has ended, with this status; None where it has to be ended, as it breaks the rules of the
    conversation.
    """

    def __init__(self, status: int | None) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


class Process:
    """One process and the socket to it, for one thread at a time."""

    def __init__(self, work: Work) -> None:
        """Raises Unavailable where it does not start."""
        self._work = work
        self._processor_s = 0.0  # as last reported
        self._deadline = time.monotonic() + _START_S
        try:
            self._start()
        except OSError as error:
            raise Unavailable(
                work.reason, f"no process for {work.what} can be started: {error.strerror}; retry"
            ) from error
        try:
            self.missing = [str(layer) for layer in self._receive("missing")[0]["missing"]]
        except (Died, TimeoutError, JobLimit, TypeError) as error:
            self.stop()
            raise Unavailable(
                work.reason,
                f"the process for {work.what} does not start; its own message stands above",
            ) from error

    def _start(self) -> None:
        work = self._work
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(self._socket.close)
            for end in (self._socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            self._process = subprocess.Popen(
                [sys.executable, "-m", work.module, str(work.memory_bytes)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=bare_environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path)),
                start_new_session=True,  # a terminal's Ctrl-C is handled by the service
            )
            unless_started.pop_all()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it does not run any more."""
        return self._process.poll() is not None

    def ask(self, data: bytes) -> tuple[dict[str, Any], str]:
        """Its answer to a job and the text with it. Raises Died, TimeoutError, JobLimit."""
        self._deadline = time.monotonic() + self._work.real_s
        self._allow(self._work.processor_s)
        try:
            self._set_timeout()
            self._socket.sendall(LENGTHS.pack(len(data), 0) + data)
        except TimeoutError:
            raise
        except (ValueError, OSError) as error:
            raise Died(self._status()) from error
        return self._receive("last")

    def stop(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        try:
            self._process.wait(self._work.end_s)
        except subprocess.TimeoutExpired:
            log.warning("confined process does not end", work=self._work.what, pid=self.pid)
        self._socket.close()

    def _receive(self, key: str) -> tuple[dict[str, Any], str]:
        """A message, whose values must have this key."""
        head, body = LENGTHS.unpack(self._exactly(LENGTHS.size))
        if head + body > self._work.answer_bytes:
            raise JobLimit(f"gave more than {self._work.answer_bytes >> 20} MB")
        data = self._exactly(head + body)
        try:
            answer: dict[str, Any] = json.loads(data[:head])
            processor_s = float(answer["processor_s"])
            text = str(memoryview(data)[head:], "utf-8", "surrogatepass")
            answer[key]
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise Died(None) from error
        if not math.isfinite(processor_s):
            raise Died(None)
        self._processor_s = processor_s
        return answer, text

    def _exactly(self, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            self._set_timeout()
            try:
                piece = self._socket.recv(min(count - len(data), _PIECE_BYTES))
            except TimeoutError:
                raise
            except OSError as error:
                raise Died(self._status()) from error
            if not piece:
                raise Died(self._status())
            data += piece
        return data

    def _set_timeout(self) -> None:
        """What is left of the conversation's time, for the next call. Raises TimeoutError."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        with contextlib.suppress(OSError):  # closed meanwhile: the call itself says so
            self._socket.settimeout(left)

    def _status(self) -> int | None:
        """Its exit status, once it has closed its end; None where it goes on without."""
        try:
            return self._process.wait(self._work.end_s)
        except subprocess.TimeoutExpired:
            return None

    def _allow(self, seconds: int) -> None:
        """Sets a processor time after which the kernel ends it, in the whole seconds that the kernel counts."""
        most = math.ceil(self._processor_s) + seconds
        with contextlib.suppress(OSError, ValueError, OverflowError):
            hard = resource.prlimit(self.pid, resource.RLIMIT_CPU)[1]
            resource.prlimit(self.pid, resource.RLIMIT_CPU, (most, hard))
