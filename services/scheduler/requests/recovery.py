"""After Redis may have lost its last writes: what this scheduler knows is restored before anything else."""

import asyncio

import structlog

from services.scheduler.output.request import Request
from services.scheduler.requests.output_tracker import OutputTracker
from shared.errors import Unavailable
from shared.queue import Queue, RequestSnapshot
from shared.telemetry.outage import Outage

log = structlog.get_logger(__name__)

_RETRY_S = 0.1


class Recovery:
    """Restores all owned requests, and those that have ended a short while ago.

    Until that is done Redis may not know a request, or its owner: its answers must not be acted on. `settled` waits for
    that.
    """

    def __init__(self, queue: Queue, scheduler_id: str, tracker: OutputTracker) -> None:
        self._queue = queue
        self._outage = Outage(log, "requests cannot be restored yet, trying again")
        self._scheduler_id = scheduler_id
        self._tracker = tracker
        self._restored = queue.restarts
        self._done = asyncio.Event()

    @property
    def is_settled(self) -> bool:
        """Whether Redis knows what it knew before it was away."""
        return self._restored == self._queue.restarts

    async def settled(self) -> None:
        """Waits for it."""
        while not self.is_settled:
            await self._done.wait()

    async def run(self) -> None:
        """Works until cancelled."""
        async for _ in self._queue.recoveries():
            while not self.is_settled:
                await self._try_to_restore()

    async def _try_to_restore(self) -> None:
        restarts = self._queue.restarts
        requests = self._tracker.requests
        try:
            answers = await self._queue.restore([_held(r) for r in requests], self._scheduler_id)
        except Unavailable as error:
            self._outage.note(error.message)
            await asyncio.sleep(_RETRY_S)
            return
        self._outage.over()
        refused = [r for r, kept in zip(requests, answers, strict=True) if not kept]
        for request in refused:
            self._tracker.on_refused(request.request_id)
        log.info("restored requests", requests=len(requests), refused=len(refused))
        self._restored = restarts
        self._done.set()
        self._done = asyncio.Event()


def _held(request: Request) -> RequestSnapshot:
    known = request.taken
    return RequestSnapshot(
        spec=known.spec,
        logs=known.logs,
        endings=known.endings,
        own_at=known.own_at,
        arrived_ms=known.arrived_ms,
        prio=known.prio,
        rank=known.rank,
        prompt_log=known.prompt_log,
        lost_decoders=known.lost_decoders,
        content=known.content,
        numerics=known.numerics,
        is_exact=known.is_exact,
    )
