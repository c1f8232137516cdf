"""One image worker as its pool sees it: a child process, its pipes, and the socket that passes file descriptors."""

import asyncio
import contextlib
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from shared.settings import bare_environment

_LENGTH = struct.Struct("<I")
# Signals from outside; any other cause of a crash is the file's fault.
_BY_OTHERS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
_SPARE_S = 2  # the kernel counts whole seconds


def worker_environment() -> dict[str, str]:
    """One picture at a time on one core: threads inside would compete with other workers."""
    return bare_environment(
        TRANSFORMERS_VERBOSITY="error",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        OPENBLAS_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
    )


class WorkerDied(Exception):
    """The process ended in the middle of a job. `by_the_file`: the file caused it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.by_the_file = status not in _BY_OTHERS
        self.out_of_time = status == -signal.SIGXCPU


class WorkerProcess:
    """One child process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process, files: socket.socket) -> None:
        self._process = process
        self._files = files
        self._processor_s = 0.0  # as last reported

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> Self:
        """Starts a process; `receive` gives its first message."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.preprocess.worker.image_worker",
                *arguments,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=worker_environment(),
                start_new_session=True,  # a terminal's Ctrl-C is handled by the service
            )
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def receive(self) -> dict[str, Any]:
        """Its next message. Raises WorkerDied."""
        assert self._process.stdout is not None
        try:
            (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
            answer: dict[str, Any] = json.loads(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerDied(await self._process.wait()) from error
        self._processor_s = answer.pop("processor_s")
        return answer

    async def ask(
        self, job: dict[str, Any], data: bytes, descriptor: int, seconds: float
    ) -> dict[str, Any]:
        """Has one file made into pixel values, within so much processor time.

        How many bytes it `needs` in the open file, for `write`, or why there are none. Raises WorkerDied.
        """
        assert self._process.stdin is not None
        text = json.dumps({**job, "bytes": len(data)}).encode()
        self._allow(seconds)
        try:
            socket.send_fds(self._files, [b"f"], [descriptor])
            self._process.stdin.write(_LENGTH.pack(len(text)) + text)
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise WorkerDied(await self._process.wait()) from error
        return await self.receive()

    async def write(self) -> dict[str, Any]:
        """Has it write what it has made: what is known of the item. Raises WorkerDied."""
        await self._allow_writing(True)
        return await self.receive()

    async def forget(self) -> None:
        """Has it throw away what it has made. Raises WorkerDied."""
        await self._allow_writing(False)

    def has_ended(self) -> bool:
        """Whether it is gone, known at once and not only after the event loop has been notified."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def processor_s(self) -> float | None:
        """Processor time that it has taken since it started, in seconds; None once it is gone."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def stop(self) -> None:
        """Kills it."""
        self._files.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _allow_writing(self, write: bool) -> None:
        assert self._process.stdin is not None
        text = json.dumps({"write": write}).encode()
        try:
            self._process.stdin.write(_LENGTH.pack(len(text)) + text)
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise WorkerDied(await self._process.wait()) from error

    def _allow(self, seconds: float) -> None:
        """Sets a processor time after which the kernel ends it."""
        most = math.ceil(self._processor_s + seconds) + _SPARE_S
        with contextlib.suppress(OSError, ValueError):
            hard = resource.prlimit(self.pid, resource.RLIMIT_CPU)[1]
            resource.prlimit(self.pid, resource.RLIMIT_CPU, (most, hard))
