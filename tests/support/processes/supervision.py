"""What the supervisor says of real processes, and waiting for what it does with them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psutil

from services.launcher.supervise.process import Program
from services.launcher.supervise.supervised_process import SupervisedProcess
from services.launcher.supervise.supervisor import Supervisor
from services.launcher.supervise.timings import USUAL, Timings


class Record:
    """The states and lines of the processes."""

    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.lines: list[str] = []

    def supervised(self, program: Program, timings: Timings = USUAL) -> SupervisedProcess:
        """Keeps it running, on the record."""
        return SupervisedProcess(
            program,
            on_state=lambda name, state: self.states.append((name, state)),
            on_line=lambda name, line: self.lines.append(f"{name}: {line}"),
            timings=timings,
        )

    def of(self, name: str) -> list[str]:
        """The states of a process, in their order."""
        return [state for who, state in self.states if who == name]

    async def said(self, line: str) -> None:
        """Waits until a process's line has been read that ends so: that it is ready may be seen earlier."""
        async with asyncio.timeout(60):
            while not any(one.endswith(line) for one in self.lines):
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[None]:
    """All its processes are ready at the beginning of the block."""
    await supervisor.start()
    try:
        await supervisor.all_ready()
        yield
    finally:
        await supervisor.stop()


def alive(pid: int | None) -> bool:
    """Whether there is a process with this id."""
    return pid is not None and psutil.pid_exists(pid)


async def until_replaced(process: SupervisedProcess, pid: int | None) -> None:
    """Waits until another process of the program than `pid` is ready."""
    async with asyncio.timeout(60):
        while process.pid in (pid, None) or not process.ready.is_set():
            await asyncio.sleep(0.02)
