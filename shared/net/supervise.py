"""Background tasks that do not die in silence."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from shared.net import tasks

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_LIVED_S = 30.0  # a task that worked for so long has not failed in a row
_MOST_IN_A_ROW = 10

failures: Counter[str] = Counter()  # of this process, by the tasks' names


class Background:
    """Runs a coroutine function until it returns or `end` is called.

    Whatever it raises is logged and counted, and after a pause it begins anew. One that fails again and again has
    something in this process against it: the process is asked to stop, in an orderly way, and is started again by
    whoever keeps it.
    """

    def __init__(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        """Begins at once. `name` is what logs and counters call it."""
        self._name = name
        self._body = body
        self._task = asyncio.create_task(self._run(), name=name)

    async def end(self) -> None:
        """Cancels it and waits until it is done."""
        await tasks.end(self._task)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s, in_a_row = FIRST_PAUSE_S, 0
        while True:
            began = loop.time()
            try:
                await self._body()
                return
            except Exception:
                if loop.time() - began > _LIVED_S:
                    pause_s, in_a_row = FIRST_PAUSE_S, 0
                in_a_row += 1
                failures[self._name] += 1
                log.exception("a background task failed", task=self._name)
            if in_a_row == _MOST_IN_A_ROW:
                log.critical("a background task fails again and again", task=self._name)
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def end(*background: "Background | None") -> None:
    """Ends several, all at once."""
    await asyncio.gather(*(one.end() for one in background if one is not None))
