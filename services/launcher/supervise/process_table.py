"""The table of processes: a file in the state folder that other tools read.

The launcher itself does not need it: while it cannot be written, tools see an old state, or none.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import structlog

from shared.errors import Unavailable
from shared.net.redis.url import with_password

log = structlog.get_logger(__name__)

_FILE = "processes.json"
_RETRY_S = 1.0  # after a write that failed


@dataclass(frozen=True, slots=True)
class Entry:
    """One process: `name` such as "decoder-1" of `service` "decoder". `since` is when `state` began (Unix time, s)."""

    name: str
    service: str
    state: str = "waiting"
    pid: int | None = None
    crashes: int = 0
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class System:
    """A running `tessera serve`, as its file describes it."""

    model: str
    urls: list[str]  # of the gateways
    redis_url: str
    redis_password_file: str = ""  # empty for none
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def queue_url(self) -> str:
        """Where the queue is, with the password. Raises InvalidRequest if its file cannot be read."""
        file = self.redis_password_file
        return with_password(self.redis_url, Path(file) if file else None)

    def of_service(self, service: str) -> list[Entry]:
        """Its processes, in the order of their names."""
        return sorted(
            (e for e in self.entries.values() if e.service == service), key=lambda e: e.name
        )


class ProcessTable:
    """A context manager that keeps the file, in an event loop: it is written at each change of a process's state."""

    def __init__(self, state: Path, system: System) -> None:
        self._path = state / _FILE
        self._retry: asyncio.TimerHandle | None = None
        self._has_warned = False
        self._system = system
        self._entries = dict(system.entries)

    def update(self, name: str, state: str, pid: int | None, crashes: int) -> None:
        """Sets the state of a process, and writes the file if it is another one than before."""
        before = self._entries[name]
        if (before.state, before.pid, before.crashes) == (state, pid, crashes):
            return
        self._entries[name] = Entry(name, before.service, state, pid, crashes, time.time())
        self._write()

    def _write(self) -> None:
        content = {**asdict(self._system), "entries": [asdict(e) for e in self._entries.values()]}
        draft = self._path.with_suffix(".tmp")
        try:
            _write_privately(draft, json.dumps(content, indent=1) + "\n")
            draft.rename(self._path)  # a reader finds the old file or the new one
        except OSError as error:
            self._warn(error)
            self._cancel_retry()
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._write)
        else:
            self._has_warned = False

    def _warn(self, error: OSError) -> None:
        """Logs a failed write, once until a write succeeds."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                f"cannot write {self._path}: {error.strerror}; tools such as `tessera bench kill` see an old state,"
                " nothing else depends on it"
            )

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()

    def __enter__(self) -> Self:
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel_retry()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _write_privately(path: Path, text: str) -> None:
    """Writes a file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)  # an existing file keeps its mode otherwise
        file.write(text)


def waiting(names: Iterable[tuple[str, str]]) -> dict[str, Entry]:
    """Entries of (name, service) for processes that have not been started."""
    return {name: Entry(name, service) for name, service in names}


def read_process_table(state: Path) -> System:
    """The system whose state folder this is. Raises Unavailable if none runs there."""
    path = state / _FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        content = {}
    if not content or not _is_locked(state / "lock"):  # a killed launcher leaves its file
        raise Unavailable("NOT_RUNNING", f"no `tessera serve` runs with the state folder {state}")
    entries = {entry["name"]: Entry(**entry) for entry in content.pop("entries")}
    return System(**content, entries=entries)


def _is_locked(path: Path) -> bool:
    """Whether a launcher holds it."""
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False
