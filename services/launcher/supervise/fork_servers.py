"""Starts and ends the processes that import libraries and fork services (`fork_server.py`). For Linux.

Few imports: these processes begin to work before the launcher has imported what it needs itself.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shared.child_process.die_with_parent import die_with_parent

if TYPE_CHECKING:
    from services.launcher.supervise.forking import ForkServer

_PROGRAM = Path(__file__).with_name("fork_server.py")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Group:
    """Services whose processes are forked from one process, and variables that it sets before it imports."""

    services: Sequence[str]
    variables: Mapping[str, str]


class ForkServers:
    """A context manager with the fork servers of a system: one for each group of services."""

    def __init__(self, groups: Sequence[Group], environment: Mapping[str, str]) -> None:
        """Starts them, where this system has what it takes."""
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: list[Group] = []
        self._controls: list[socket.socket] = []
        self._servers: dict[int, ForkServer] = {}
        self._forget: Callable[[], None] | None = None  # ends the watch for their end
        self.use(groups)

    def use(self, groups: Sequence[Group]) -> None:
        """Ends them and starts others, unless these are the groups that they were started for."""
        wanted = list(groups) if _can_fork() else []
        if wanted == self._groups:
            return
        self.close()
        if wanted:
            self._start(wanted)

    def _start(self, groups: list[Group]) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in groups]
        theirs = [pair[1] for pair in pairs]
        arguments = [
            (end.fileno(), list(group.services), dict(group.variables))
            for end, group in zip(theirs, groups, strict=True)
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), json.dumps(arguments)],
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[end.fileno() for end in theirs],
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        for end in theirs:
            end.close()
        self._groups = groups
        self._controls = [pair[0] for pair in pairs]

    def of(self, service: str, variables: Mapping[str, str]) -> "ForkServer | None":
        """The one that has imported a service's libraries with these variables set, if there is one. Called in an event
        loop, where all of them are collected when they end before their time."""
        from services.launcher.supervise.forking import ForkServer, call_at_end

        if self._process is not None and self._forget is None:
            self._forget = call_at_end(self._process.pid, self.close)
        for number, group in enumerate(self._groups):
            if service in group.services and group.variables == variables:
                if number not in self._servers:
                    self._servers[number] = ForkServer(self._controls[number], group.services)
                return self._servers[number]
        return None

    def close(self) -> None:
        """Ends them; processes that are wanted later are started."""
        process, self._process = self._process, None
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()
        if process is not None:
            # The others of its group become children of this process when it has ended, and are collected too.
            _adopt_orphans(True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-process.pid, 0)
            _adopt_orphans(False)
        for control in self._controls:
            if control.fileno() >= 0:
                # Whoever waits for an answer reads the end; closed at once it would wait for ever.
                control.shutdown(socket.SHUT_RDWR)
        self._groups, self._controls, self._servers = [], [], {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _can_fork() -> bool:
    """Whether this is Linux 5.3 or later, and lets a process become the parent of others."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return _adopt_orphans(False)


def _adopt_orphans(wanted: bool) -> bool:
    """Whether this system can make this process the parent of those below it whose parent ends. Source: prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) == 0)
