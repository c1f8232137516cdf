"""The scheduler's own lease in Redis, and the end of other schedulers' leases."""

import asyncio
from collections.abc import Callable, Collection

import structlog

from shared.errors import Unavailable
from shared.queue import Queue
from shared.telemetry.outage import Outage
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

log = structlog.get_logger(__name__)

_RENEW_S = 0.4
_TWO_LOOKS_S = 0.5
_NEXT_LOOK_S = 0.02  # after the moment from which on there may be something to see


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
        on_others: Callable[[Collection[str]], None] = lambda _: None,
        contents: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`on_others(ids)` is called after each renewal with the other schedulers that are alive. `contents()`: of the
        decoders that are bound."""
        self._queue = queue
        self._scheduler_id = scheduler_id
        self._load = load
        self._tokens_per_s = tokens_per_s
        self._on_others = on_others
        self._contents = contents
        # Scheduler -> its deadline, and when that was first seen to have passed.
        self._suspects: dict[str, tuple[float, float]] = {}

    async def register(self) -> None:
        """Takes the lease for the first time, waiting for Redis if need be."""
        outage = Outage(log, "waiting for Redis")
        while True:
            try:
                await self._queue.renew(
                    self._scheduler_id, self._load(), register=True, tokens_per_s=None
                )
                return
            except Unavailable as error:
                outage.note(error.message)
                await asyncio.sleep(_RENEW_S)

    async def run(self) -> None:
        """Renews until cancelled. Returns when this scheduler itself has been fenced off: it must end at once."""
        outage = Outage(log, "the lease cannot be renewed, trying again")
        wait_s = _RENEW_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = _RENEW_S
            try:
                renewal = await self._queue.renew(
                    self._scheduler_id,
                    self._load(),
                    register=False,
                    tokens_per_s=self._tokens_per_s(),
                    contents=self._contents(),
                )
                if renewal is None:
                    log.error("fenced off: another scheduler has taken over")
                    return
                now_ms, others = renewal.now_ms, renewal.others
                self._on_others([sid for sid, deadline in others.items() if deadline >= now_ms])
                await self._fence_the_dead(now_ms, others)
                wait_s = self._until_next_look(now_ms, others)
            except Unavailable as error:
                outage.note(error.message)
            else:
                outage.over()

    def _until_next_look(self, now_ms: int, others: dict[str, float]) -> float:
        """Not later than a lease that nobody renews can be found to have run out: every moment more is one in which the
        requests of a dead scheduler stand still."""
        clock = asyncio.get_running_loop().time()
        ends = [(deadline - now_ms) / 1000 for deadline in others.values() if deadline >= now_ms]
        looks = [seen + _TWO_LOOKS_S - clock for _, seen in self._suspects.values()]
        looks = [seconds for seconds in looks if seconds > 0]
        return max(_NEXT_LOOK_S, min([_RENEW_S, *(s + _NEXT_LOOK_S for s in (*ends, *looks))]))

    async def _fence_the_dead(self, now_ms: int, others: dict[str, float]) -> None:
        clock = asyncio.get_running_loop().time()
        suspects: dict[str, tuple[float, float]] = {}
        for sid, deadline in others.items():
            if deadline >= now_ms:
                continue
            known = self._suspects.get(sid)
            first_seen = known[1] if known is not None and known[0] == deadline else clock
            returned = -1
            if clock - first_seen >= _TWO_LOOKS_S:
                returned = await self._queue.fence(sid, deadline)
            if returned >= 0:
                log.warning("fenced off a dead scheduler", scheduler=sid, requests=returned)
            else:  # not yet, or refused while Redis recovers
                suspects[sid] = (deadline, first_seen)
        self._suspects = suspects
