"""Whether a process is ready and its event loop still runs, answered by a thread beside the loop.

A process has a unix datagram socket and a thread that answers on it: no backlog of connections delays the question,
and it needs no free file descriptor. The answer holds for how long the loop has not run, and how much of that its
thread has computed, so that a busy loop is distinguished from a blocked one. Time in which it waited for a core does
not count.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

# A loop that has not run for so long answers no calls.
LATE_S = 1.0

_EVERY_S = 0.1
_READY, _NOT_READY = b"ready", b"not-ready"
_LONGEST = 64


@dataclass(frozen=True, slots=True)
class Beat:
    """The state that a process reports."""

    is_ready: bool
    age_s: float  # for which its event loop has not run, and could have
    computed_s: float  # of these by the loop's thread: it is busy

    @property
    def is_late(self) -> bool:
        """Whether the loop is blocked, or takes so long for an iteration that it seems to be."""
        return self.age_s > LATE_S

    @property
    def idle_s(self) -> float:
        """For how long the loop's thread has done nothing though its turn is over."""
        return self.age_s - self.computed_s


class _Clocks(NamedTuple):
    """Two clocks of a thread, in seconds."""

    could_run_s: float  # stands still while it waits for a core
    computed_s: float  # goes on while it has one

    @classmethod
    def of(cls, thread: int) -> "_Clocks":
        """As they are now."""
        now = time.monotonic()
        try:
            # Nanoseconds on a core, nanoseconds of waiting for one, time slices. Source:
            # Documentation/scheduler/sched-stats.rst.
            on_core, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()
        except (OSError, ValueError):  # a kernel that does not count
            return cls(now, 0.0)
        return cls(now - int(waited) / 1e9, int(on_core) / 1e9)


class Heartbeat:
    """Reports this process's state on a unix socket, from `start` to `stop`."""

    def __init__(self, path: Path, is_ready: Callable[[], bool]) -> None:
        """`is_ready` is called on the event loop, several times a second."""
        self._path = path
        self._is_ready = is_ready
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._timer: asyncio.TimerHandle | None = None
        self._thread = 0  # the event loop's
        self._told = (False, _Clocks(0.0, 0.0))
        self._stopped = False

    def start(self) -> None:
        """Begins, on the running event loop. Raises OSError if the path cannot be bound."""
        self._path.unlink(missing_ok=True)
        self._socket.bind(str(self._path))
        self._thread = threading.get_native_id()
        self.beat()
        threading.Thread(target=self._answer, name="heartbeat", daemon=True).start()

    def beat(self) -> None:
        """Notes that the loop runs, now and periodically."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self.beat)
        self._told = (self._is_ready(), _Clocks.of(self._thread))

    def stop(self) -> None:
        """Answers no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread

    def _answer(self) -> None:
        with self._socket:
            while not self._stopped:
                _, asker = self._socket.recvfrom(_LONGEST)
                is_ready, then = self._told
                word, now = _READY if is_ready else _NOT_READY, _Clocks.of(self._thread)
                since = (now.could_run_s - then.could_run_s, now.computed_s - then.computed_s)
                answer = b"%s %.3f %.3f" % (word, *since)
                with contextlib.suppress(OSError):  # the asker may be gone
                    if asker:
                        self._socket.sendto(answer, socket.MSG_DONTWAIT, asker)


class Question:
    """One question to a process; a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if there is no socket."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self.socket.bind("")  # the kernel finds a name, to which the answer goes
            self.socket.connect(str(path))
            self.socket.send(b"?")
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def answer(self) -> Beat:
        """Waits for the answer, as long as the caller does."""
        return _read(await asyncio.get_running_loop().sock_recv(self.socket, _LONGEST))

    def wait(self, timeout_s: float) -> Beat:
        """The same without an event loop. Raises TimeoutError."""
        self.socket.settimeout(timeout_s)
        return _read(self.socket.recv(_LONGEST))


def _read(answer: bytes) -> Beat:
    word, age, computed = answer.split()
    return Beat(word == _READY, float(age), float(computed))
