"""One process of a program: started cold, or held ready with its libraries imported until it is wanted."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from services.launcher.supervise.die_with_parent import die_with_parent
from services.launcher.supervise.prewarmed_process import READY
from services.launcher.supervise.probe import Probe

_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Program:
    """What to run, and how to ask it how it is."""

    name: str  # unique, such as "decoder-1"
    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    probe: Probe
    socket: Path | None = None  # its unix socket, removed before each start
    end_with: signal.Signals = signal.SIGKILL  # what it gets when the launcher itself is gone
    room: str = ""  # such as "decoder", "redis"
    held_command: Sequence[str] = ()  # the same as a spare process (`held.py`); none unless given
    niceness: int = 0  # how much it gives way to others where cores are short
    quiet: bool = False  # its lines are shown only if it does not come up
    umask: int = -1  # what its files' modes lack; the launcher's own unless given


class Life:
    """A process, and the lines that it prints."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        lines: asyncio.StreamReader,
        transport: asyncio.ReadTransport,
    ) -> None:
        self.process = process
        self.lines = lines
        self._transport = transport

    @classmethod
    async def begin(cls, program: Program, *, held: bool = False) -> Self:
        """Starts it, at work or held."""
        # A pipe of our own: asyncio's `wait` returns only when its pipes are closed at the other
        # end, which may be long after the process when others of its making hold them.
        read_end, write_end = os.pipe()
        lines = asyncio.StreamReader(limit=_LONGEST_LINE)
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_end, "rb", 0)
            )
            process = await asyncio.create_subprocess_exec(
                *(program.held_command if held else program.command),
                env=dict(program.environment),
                stdin=asyncio.subprocess.PIPE if held else asyncio.subprocess.DEVNULL,
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

    async def is_held(self) -> bool:
        """Waits until a held process has imported everything; False if it has ended instead."""
        with contextlib.suppress(ValueError):
            while line := await self.lines.readline():
                if line == READY:
                    return True
        return False

    def release(self) -> bool:
        """Lets a held process go to work; False if it is gone."""
        if self.process.returncode is not None or self.process.stdin is None:
            return False
        self.process.stdin.write(b"\n")
        self.process.stdin.close()
        return True

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Sends a signal to it, or to all that it started too."""
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.process.pid, number)
            elif self.process.returncode is None:
                self.process.send_signal(number)

    def forget(self) -> None:
        """Reads no more of its lines."""
        self._transport.close()


class Spare:
    """At most one held process of a program, made anew each time it has been taken."""

    # One at a time on a machine: imports take a core each, and the rooms are at work.
    _turn = asyncio.Semaphore(1)

    def __init__(self, program: Program) -> None:
        self._program = program
        self._life: Life | None = None
        self._making: asyncio.Task[None] | None = None
        self._has_begun = False  # the process of the one that is being made runs

    def prepare(self) -> None:
        """Makes one in the background, if there is none and the program has a way."""
        if self._program.held_command and self._making is None:
            self._making = asyncio.create_task(self._make())

    async def take(self) -> Life | None:
        """The process, at work from now on; None if there is none. One that is importing still is waited for: it is
        ahead of one that begins now.
        """
        if self._making is not None and self._has_begun:
            await asyncio.wait([self._making])
        await self._end_making()
        life, self._life = self._life, None
        return life if life is not None and life.release() else None

    def give_up(self) -> None:
        """Makes none any more; who waits for one gets none."""
        if self._making is not None:
            self._making.cancel()

    async def close(self) -> None:
        """Ends it."""
        await self._end_making()
        life, self._life = self._life, None
        if life is not None:
            await _end(life)

    async def _make(self) -> None:
        async with self._turn:
            life = await Life.begin(self._program, held=True)
            self._has_begun = True
            try:
                held = await life.is_held()
            except BaseException:
                await _end(life)
                raise
            if held:
                self._life = life
            else:
                await _end(life)

    async def _end_making(self) -> None:
        making, self._making = self._making, None
        self._has_begun = False
        if making is not None:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)


async def _end(life: Life) -> None:
    life.signal(signal.SIGKILL, group=True)
    await life.process.wait()
    life.forget()
