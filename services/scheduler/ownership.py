"""The scheduler's own lease in Redis, and the end of other schedulers' leases."""

import asyncio
from collections.abc import Callable

import structlog

from shared.errors import Unavailable
from shared.queue import Queue
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

log = structlog.get_logger(__name__)

_RENEW_S = 0.4
_TWO_LOOKS_S = 0.5


class Ownership:
    """Renews the lease every 0.4 s and fences off schedulers whose lease has run out.

    A deadline must be seen expired in two answers of Redis half a second apart: when Redis itself was frozen, every
    lease looks expired in the first answer after it wakes.
    """

    def __init__(
        self,
        queue: Queue,
        scheduler_id: str,
        load: Callable[[], GetLoadResponse],
        tokens_per_s: Callable[[], float | None],
    ) -> None:
        self._queue = queue
        self._scheduler_id = scheduler_id
        self._load = load
        self._tokens_per_s = tokens_per_s
        self._suspects: dict[
            str, tuple[float, float]
        ] = {}  # sid -> deadline, when first seen expired

    async def register(self) -> None:
        """Takes the lease for the first time, waiting for Redis if need be."""
        while True:
            try:
                await self._queue.renew(
                    self._scheduler_id, self._load(), register=True, tokens_per_s=None
                )
                return
            except Unavailable as error:
                log.warning("waiting for redis", error=error.message)
                await asyncio.sleep(_RENEW_S)

    async def run(self) -> None:
        """Renews until cancelled. Returns when this scheduler itself has been fenced off: it must end at once."""
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                renewal = await self._queue.renew(
                    self._scheduler_id,
                    self._load(),
                    register=False,
                    tokens_per_s=self._tokens_per_s(),
                )
                if renewal is None:
                    log.error("fenced off: another scheduler has taken over")
                    return
                await self._fence_the_dead(renewal.now_ms, renewal.others)
            except Unavailable as error:
                log.warning("lease not renewed", error=error.message)

    async def _fence_the_dead(self, now_ms: int, others: dict[str, float]) -> None:
        clock = asyncio.get_running_loop().time()
        suspects: dict[str, tuple[float, float]] = {}
        for sid, deadline in others.items():
            if deadline >= now_ms:
                continue
            known = self._suspects.get(sid)
            first_seen = known[1] if known is not None and known[0] == deadline else clock
            if clock - first_seen >= _TWO_LOOKS_S:
                returned = await self._queue.fence(sid, deadline)
                log.warning("fenced off a dead scheduler", scheduler=sid, requests=returned)
            else:
                suspects[sid] = (deadline, first_seen)
        self._suspects = suspects
