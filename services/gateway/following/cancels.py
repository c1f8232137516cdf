"""Cancels requests whose clients have left: in the background, and again until Redis has taken it."""

import asyncio

import structlog

from shared.environment import monotonic
from shared.errors import Unavailable
from shared.net import tasks
from shared.queue import Queue

log = structlog.get_logger(__name__)

_RETRY_S = 0.5
_FOR_S = 60.0
_SETTLE_S = 5.0


class Cancels:
    """The cancellations that Redis has not taken yet. One worker, so that many clients that leave while
    Redis is away cost one attempt at a time.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        # (request id, tenant, idempotency key) -> when to give up
        self._due: dict[tuple[str, str, str], float] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, request_id: str, tenant: str, idempotency_key: str = "") -> None:
        """Withdraws the reservation and cancels the request, whichever there is."""
        self._due[request_id, tenant, idempotency_key] = monotonic() + _FOR_S
        if self._task is None or self._task.done():
            self._task = tasks.begin(self._work())

    async def settled(self) -> None:
        """Waits until Redis has taken all, at most a few seconds: without a follower requests end by themselves."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_SETTLE_S)
            await tasks.end(self._task)

    async def _work(self) -> None:
        while self._due:
            who, give_up_at = next(iter(self._due.items()))
            request_id, tenant, key = who
            try:
                await self._queue.withdraw(request_id, tenant=tenant, idempotency_key=key)
                await self._queue.cancel(request_id, tenant, unless_joined=True)
            except Unavailable as error:
                if monotonic() > give_up_at:
                    log.warning("not cancelled", request_id=request_id, error=error.message)
                    self._due.pop(who, None)
                await asyncio.sleep(_RETRY_S)
            except Exception:  # the next ones are to be cancelled all the same
                log.exception("not cancelled", request_id=request_id)
                self._due.pop(who, None)
            else:
                self._due.pop(who, None)
