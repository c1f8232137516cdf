"""Background tasks whose failures are logged and counted, and which are then started again."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from shared.net import tasks
from shared.net.backoff import Backoff

log = structlog.get_logger(__name__)

_BACKOFF = Backoff(first_s=0.5, longest_s=8.0)
_LIVED_S = 30.0  # a task that ran for so long has not failed in a row
_MOST_IN_A_ROW = 10

failures: Counter[str] = Counter()  # of this process, by the tasks' names


class Background:
    """Runs a coroutine function until it returns or `end` is called.

    What it raises is logged and counted, and after a pause it is called again. When it fails ten times in a row, the
    process gets SIGTERM: it stops in an orderly way, and its supervisor starts it anew.
    """

    def __init__(
        self, name: str, body: Callable[[], Awaitable[None]], backoff: Backoff = _BACKOFF
    ) -> None:
        """Begins at once. `name` names it in logs and counters."""
        self._name = name
        self._body = body
        self._backoff = backoff
        self._task = asyncio.create_task(self._run(), name=name)

    async def end(self) -> None:
        """Cancels it and waits until it is done."""
        await tasks.end(self._task)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        in_a_row = 0
        while True:
            began = loop.time()
            try:
                await self._body()
                return
            except Exception:
                if loop.time() - began > _LIVED_S:
                    in_a_row = 0
                in_a_row += 1
                failures[self._name] += 1
                log.exception("a background task failed", task=self._name)
            if in_a_row == _MOST_IN_A_ROW:
                log.critical("a background task fails again and again", task=self._name)
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(self._backoff.pause_s(in_a_row))


async def end(*background: "Background | None") -> None:
    """Ends several, all at once."""
    await asyncio.gather(*(one.end() for one in background if one is not None))
