"""Waits for what other processes or tasks do, for as long as a crowded machine may need."""

import asyncio
import time
from collections.abc import Callable

import psutil


def until(
    condition: Callable[[], bool], what: str, within_s: float = 180, every_s: float = 0.05
) -> None:
    """Returns once the condition holds; the test fails, naming `what`, where it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(every_s)


async def until_async(condition: Callable[[], bool], within_s: float = 60) -> None:
    """The same beside other tasks of the event loop. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
