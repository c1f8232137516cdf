"""Whether this gateway can serve: Redis answered lately, and each service that requests need is running."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Self

from shared.environment import monotonic
from shared.errors import Unavailable
from shared.net import supervise
from shared.net.supervise import Background
from shared.queue import Queue
from shared.queue.registry import Directory

_PING_S = 1.0
_PING_TIMEOUT_S = 2.0
_REDIS_LATELY_S = 10.0


class Health:
    """Readiness. A process that is not ready is still alive."""

    def __init__(self, queue: Queue, services: Mapping[str, Directory]) -> None:
        """`services`: those that requests need, by the names that people read."""
        self._queue = queue
        self._services = services
        self._redis_at = float("-inf")
        self._draining = False
        self._task: Background | None = None

    async def __aenter__(self) -> Self:
        self._task = Background("health", self._ping)
        return self

    async def __aexit__(self, *_: object) -> None:
        await supervise.end(self._task)

    def drain(self) -> None:
        """Not ready from now on."""
        self._draining = True

    @property
    def is_draining(self) -> bool:
        """Whether it is about to end."""
        return self._draining

    @property
    def instances(self) -> Mapping[str, int]:
        """How many processes of each service requests need are in the registry."""
        return {name: len(found.members) for name, found in self._services.items()}

    def missing(self) -> list[str]:
        """What keeps it from being ready, in words; empty if it is ready."""
        reasons = ["shutting down"] if self._draining else []
        if monotonic() - self._redis_at > _REDIS_LATELY_S:
            reasons.append("no answer from Redis")
        reasons += [
            f"no {name} running" for name, found in self._services.items() if not found.members
        ]
        return reasons

    async def _ping(self) -> None:
        while True:
            with contextlib.suppress(Unavailable, TimeoutError):
                async with asyncio.timeout(_PING_TIMEOUT_S):
                    await self._queue.depth()
                self._redis_at = monotonic()
            await asyncio.sleep(_PING_S)
