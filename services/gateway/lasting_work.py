"""Work that goes on when the exchange that began it has ended."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self

import structlog

from shared.errors import ServingError
from shared.net import supervise, tasks
from shared.net.supervise import Background

log = structlog.get_logger(__name__)


class LastingWork:
    """Leaving the block ends what is left of it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._background: list[Background] = []
        self._at_end: list[Callable[[], Awaitable[None]]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await supervise.end(*self._background)
        await tasks.end(*self._tasks)
        for body in self._at_end:
            await body()

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs it once. What it raises is logged."""
        task = tasks.begin(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def keep_up(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        """Runs it for as long as the gateway, again where it fails. `name` names it in logs."""
        self._background.append(Background(name, body))

    def at_end(self, body: Callable[[], Awaitable[None]]) -> None:
        """Runs it when all that was left has ended."""
        self._at_end.append(body)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, ServingError):
            log.warning("work behind an answer failed", error=error.reason)
        else:
            log.error("work behind an answer failed", exc_info=error)
