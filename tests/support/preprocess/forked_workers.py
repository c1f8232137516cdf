"""Image workers that are forked from one process, which has imported their libraries once for all tests of this one.

As a program of its own (`WorkerProcess.start`, in `tests/preprocess/test_process.py` and in whole systems) each takes
0.8 s of processor time to import them. In all else they are the same: confined, and one for each service.
"""

import asyncio
import atexit
import contextlib
import functools
import gc
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, Self

from services.preprocess.worker.process import WorkerProcess, worker_environment

_NUMBER = struct.Struct("<i")
_MOST_BYTES = 1 << 16  # of a job


class ForkedWorker(WorkerProcess):
    """`WorkerProcess` of such a fork."""

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> Self:
        """See `WorkerProcess`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        our_files, their_files = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        status, their_status = os.pipe()
        with theirs, their_files:
            descriptors = [theirs.fileno(), their_files.fileno(), their_status, 2]
            _forking_process().fork(arguments, descriptors)
            os.close(their_status)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        pid = await asyncio.to_thread(_number, status)
        assert pid is not None, "the process that forks workers has ended"
        process = _Fork(reader, writer, status, pid)
        return cls(process, our_files)  # type: ignore[arg-type]  # all of a Process that it asks for

    def has_ended(self) -> bool:
        """See `WorkerProcess`, which asks for a child of its own."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([descriptor], [], [], 0)[0])
        finally:
            os.close(descriptor)


class _Fork:
    """What `WorkerProcess` asks of an `asyncio.subprocess.Process`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, pid: int
    ) -> None:
        self.stdin, self.stdout, self.pid = writer, reader, pid
        self._status = status
        self._ended: asyncio.Future[int] | None = None

    def kill(self) -> None:
        """Sends SIGKILL. Raises ProcessLookupError."""
        os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit status."""
        if self._ended is None:
            self._ended = asyncio.ensure_future(self._wait())
        return await asyncio.shield(self._ended)

    async def _wait(self) -> int:
        found = await asyncio.to_thread(_number, self._status)
        os.close(self._status)
        self.stdin.close()
        return -signal.SIGKILL if found is None else found


class _ForkingProcess:
    """The process that has imported the libraries, from outside."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=worker_environment(),
                start_new_session=True,
            )
        self.pid = self._process.pid

    def fork(self, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
        """Asks for a worker with these: its messages, its files, where its id and its status go, its errors."""
        job = json.dumps({"arguments": arguments, "path": [path for path in sys.path if path]})
        with self._lock:
            socket.send_fds(self._socket, [job.encode()], list(descriptors))

    def stop(self) -> None:
        """It ends with its input."""
        self._socket.close()
        self._process.wait()


@functools.cache
def _forking_process() -> _ForkingProcess:
    process = _ForkingProcess()
    atexit.register(process.stop)
    return process


def worker_pids() -> list[int]:
    """The workers of all services in this process."""
    pid = _forking_process().pid
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def _number(descriptor: int) -> int | None:
    """The next one; None where the forking process has ended."""
    data = os.read(descriptor, _NUMBER.size)
    return _NUMBER.unpack(data)[0] if data else None


def _main(number: str) -> None:
    """Forks until its input ends."""
    from services.preprocess.worker import image_worker, processor_maker
    from shared.checkpoint.processor import image_processor_class

    del processor_maker
    image_processor_class("CLIPImageProcessor")
    gc.freeze()  # what is never written to is shared by all
    jobs = socket.socket(fileno=int(number))
    with selectors.DefaultSelector() as selector:
        selector.register(jobs, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fileobj)
                    _report(key.fd, *key.data)
                    continue
                data, descriptors, _, _ = socket.recv_fds(jobs, _MOST_BYTES, 4)
                if not data:
                    return
                pid = os.fork()
                if not pid:
                    for other in [key.fd for key in selector.get_map().values()]:
                        os.close(other)
                    _work(image_worker.main, json.loads(data), descriptors)
                messages, files, status, errors = descriptors
                for descriptor in (messages, files, errors):
                    os.close(descriptor)
                os.write(status, _NUMBER.pack(pid))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))


def _report(descriptor: int, pid: int, status: int) -> None:
    """Says how a worker has ended."""
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # whoever asked for it is gone
        os.write(status, _NUMBER.pack(ended))
    os.close(status)
    os.close(descriptor)


def _work(run: Any, job: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Becomes a worker as if it had been started as a program; does not return."""
    messages, files, status, errors = descriptors
    os.setsid()
    for descriptor, number in ((messages, 0), (messages, 1), (errors, 2)):
        os.dup2(descriptor, number)
    for descriptor in (messages, status, errors):
        os.close(descriptor)
    sys.path[:] = job["path"]
    code = 1
    try:
        run(*job["arguments"], str(files))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    _main(*sys.argv[1:])
