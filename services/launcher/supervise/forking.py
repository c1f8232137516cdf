"""The launcher's side of `fork_server.py`: has processes forked, and waits for their end. For Linux."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import structlog

log = structlog.get_logger(__name__)

_LONGEST_REQUEST = 128 << 10  # bytes: the half of what a socket takes
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def call_at_end(pid: int, call: Callable[[], None]) -> Callable[[], None]:
    """Calls `call` on the running event loop when a child process has ended, which `call` collects. The function that
    it returns ends the watch."""
    loop, descriptor = asyncio.get_running_loop(), os.pidfd_open(pid)

    def forget() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)

    loop.add_reader(descriptor, call)
    return forget


class ForkedProcess:
    """A child process that a fork server has made; as asyncio's subprocesses are used."""

    stdin = None

    def __init__(self, pid: int) -> None:
        """In an event loop."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forget = call_at_end(pid, self._collect)

    async def wait(self) -> int:
        """Waits for its end; its exit status, negative for a signal."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        # Not another process: the number is free only when this one has been collected.
        os.kill(self.pid, number)

    def _collect(self) -> None:
        self._forget()
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set_result(self.returncode)


class ForkServer:
    """Has processes of some services forked, one at a time."""

    _waiting = 0  # of all servers

    def __init__(self, control: socket.socket, services: Sequence[str]) -> None:
        control.setblocking(False)
        self._services = services
        self._control = control
        self._lock = asyncio.Lock()
        self._is_usable = True

    async def fork(
        self,
        service: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        *,
        end_with: signal.Signals,
        niceness: int,
    ) -> ForkedProcess | None:
        """A process of its own session that runs the module `command[-1]` in this environment, as `command` would, and
        writes to the descriptor `output`; `end_with` and `niceness` as in `Program`. None where it has to be started.
        """
        request = {
            "service": service,
            "module": command[-1],
            "command": list(command),
            "environment": dict(environment),
            "end_with": int(end_with),
            "niceness": niceness,
        }
        message = json.dumps(request).encode()
        if len(message) > _LONGEST_REQUEST:
            return None
        async with self._lock:
            if not self._is_usable:
                return None
            try:
                with _subreaper():
                    socket.send_fds(self._control, [message], [output])
                    answer = await asyncio.get_running_loop().sock_recv(self._control, 4096)
            except OSError as error:
                answer = json.dumps({"refused": str(error)}).encode()
            except asyncio.CancelledError:
                self.close()  # an answer that nobody waits for would be taken for the next one's
                raise
        said = json.loads(answer or b'{"refused": "it has ended"}')
        if "pid" in said:
            return ForkedProcess(said["pid"])
        if self._is_usable:
            self.close()
            log.info("services are started, and not forked", services=self._services, **said)
        return None

    def close(self) -> None:
        """Every other process is started."""
        self._is_usable = False
        self._control.close()


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Meanwhile processes below this one whose parent ends become its children. Source: prctl(2)."""
    ForkServer._waiting += 1
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        ForkServer._waiting -= 1
        if not ForkServer._waiting:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
