"""One process of a program: started when it is needed, or prewarmed (its libraries imported) before that."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from services.launcher.supervise.forking import ForkedProcess, ForkServer
from services.launcher.supervise.prewarmed_process import PREWARMED
from services.launcher.supervise.probe import Probe
from shared.child_process.die_with_parent import die_with_parent

_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Program:
    """What to run, and how to ask for its condition."""

    name: str  # unique, such as "decoder-1"
    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    probe: Probe
    socket: Path | None = None  # its unix socket, removed before each start
    end_with: signal.Signals = signal.SIGKILL  # what it gets when the launcher itself has ended
    service: str = ""  # such as "decoder", "redis"
    prewarm_command: Sequence[str] = ()  # starts it prewarmed; empty where it cannot be
    # What forks its processes; None where they are started.
    fork_server: ForkServer | None = field(default=None, repr=False, compare=False)
    niceness: int = 0  # added to the launcher's own
    quiet: bool = False  # its lines are shown only if it does not become ready
    umask: int = -1  # -1 keeps the launcher's
    pause_s: float = 0.0  # at least so long between its end and its next start


class Process:
    """A running process, and the lines that it prints."""

    def __init__(
        self,
        process: asyncio.subprocess.Process | ForkedProcess,
        lines: asyncio.StreamReader,
        transport: asyncio.ReadTransport,
    ) -> None:
        self.lines = lines
        self._process = process
        self._transport = transport

    @classmethod
    async def start(cls, program: Program, *, prewarm: bool = False) -> Self:
        """Starts the program, or a prewarmed process of it, which does nothing until `activate`."""
        # A pipe of our own: asyncio's `wait` returns only when its pipes are closed at the other end, which
        # processes that the program started may keep open for long after it has ended.
        read_end, write_end = os.pipe()
        lines = asyncio.StreamReader(limit=_LONGEST_LINE)
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_end, "rb", 0)
            )
            forked = None if prewarm else await _forked(program, write_end)
            process = forked or await asyncio.create_subprocess_exec(
                *(program.prewarm_command if prewarm else program.command),
                env=dict(program.environment),
                stdin=asyncio.subprocess.PIPE if prewarm else asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                # Ctrl-C in a terminal reaches the launcher alone, which ends them in the right order.
                start_new_session=True,
                umask=program.umask,
                preexec_fn=die_with_parent(program.end_with, program.niceness),
            )
        finally:
            os.close(write_end)
        return cls(process, lines, transport)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Waits for its end; its exit status, negative for a signal."""
        return await self._process.wait()

    async def wait_until_prewarmed(self) -> bool:
        """Waits until a prewarmed process has imported everything; False if it has ended instead."""
        with contextlib.suppress(ValueError):
            while line := await self.lines.readline():
                if line == PREWARMED:
                    return True
        return False

    def activate(self) -> bool:
        """Lets a prewarmed process run its program; False if it has ended."""
        if self._process.returncode is not None or self._process.stdin is None:
            return False
        self._process.stdin.write(b"\n")
        self._process.stdin.close()
        return True

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Sends a signal to it, or to all that it started too."""
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self._process.pid, number)
            elif self._process.returncode is None:
                self._process.send_signal(number)

    def close(self) -> None:
        """Closes the pipe from which its lines are read."""
        self._transport.close()


class PrewarmedProcess:
    """At most one prewarmed process of a program; a new one is started after each `take`."""

    # One at a time on a machine: each import keeps a core busy, beside services that are computing.
    _importing = asyncio.Semaphore(1)

    def __init__(self, program: Program) -> None:
        self._program = program
        self._process: Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_importing = False

    def prepare(self) -> None:
        """Starts one in the background, if there is none and the program can be prewarmed."""
        if self._program.prewarm_command and self._starting is None:
            self._starting = asyncio.create_task(self._start())

    async def take(self) -> Process | None:
        """The process, activated; None if there is none. One that is still importing is waited for: it is ready
        sooner than one that starts now.
        """
        if self._starting is not None and self._is_importing:
            await asyncio.wait([self._starting])
        await self._stop_starting()
        process, self._process = self._process, None
        return process if process is not None and process.activate() else None

    def cancel(self) -> None:
        """Starts none any more; a `take` that waits for one gets none."""
        if self._starting is not None:
            self._starting.cancel()

    async def close(self) -> None:
        """Ends the process, if there is one."""
        await self._stop_starting()
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _start(self) -> None:
        async with self._importing:
            process = await Process.start(self._program, prewarm=True)
            self._is_importing = True
            try:
                is_prewarmed = await process.wait_until_prewarmed()
            except BaseException:
                await _end(process)
                raise
            if is_prewarmed:
                self._process = process
            else:
                await _end(process)

    async def _stop_starting(self) -> None:
        starting, self._starting = self._starting, None
        self._is_importing = False
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)


async def _forked(program: Program, output: int) -> ForkedProcess | None:
    if program.fork_server is None:
        return None
    return await program.fork_server.fork(
        program.service,
        program.command,
        program.environment,
        output,
        end_with=program.end_with,
        niceness=program.niceness,
    )


async def _end(process: Process) -> None:
    process.signal(signal.SIGKILL, group=True)
    await process.wait()
    process.close()
