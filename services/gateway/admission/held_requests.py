"""What this gateway answers for while it follows requests: it tells Redis that they are followed,
ends those that waited too long where no scheduler does, and holds what it takes to put them back
when Redis comes back without its last seconds.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Self

import structlog

from services.gateway.admission.request_options import KEEP_S, Timeouts
from services.gateway.following.cancels import Cancels
from services.gateway.following.choice_log import ChoiceLog
from services.gateway.following.follower import Follow, Follower
from services.gateway.telemetry.metrics import Metrics
from shared.errors import Unavailable
from shared.net import supervise
from shared.net.supervise import Background
from shared.queue import Queue, RequestSnapshot
from tessera.scheduler.v1.queue_pb2 import RequestSpec

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_RENEW_S = 5.0
# So long after the end, or after the last client here has left, a request can still be put back.
_HOLD_S = 10.0
# A live follower is heard of at least so often.
_SHORTEST_MS = 15_000
_RESTORE_TRIES = 10
_RESTORE_RETRY_S = 0.2


@dataclass(slots=True)
class Holding:
    """One followed request and all that its place in the queue needs."""

    follow: Follow
    spec: RequestSpec
    arrived_ms: int
    prio: str = "interactive"
    rank: int = 0
    idempotency_key: str = ""
    # By the local clock: when its time to wait is over, 0 for never; when it may be forgotten.
    expires_at: float = 0.0
    forget_at: float = 0.0

    def held(self) -> RequestSnapshot:
        """For `Queue.restore`."""
        follow = self.follow
        return RequestSnapshot(
            spec=self.spec,
            logs=tuple(log.records for log in follow.choices),
            endings=tuple(log.ending for log in follow.choices),
            arrived_ms=self.arrived_ms,
            prio=self.prio,
            rank=self.rank,
            prompt_log=follow.prompt.records if follow.prompt is not None else b"",
            idempotency_key=self.idempotency_key,
            follow_ms=follow_ms(self.spec.keep_ms),
        )

    @property
    def tokens(self) -> int:
        """Of all choices."""
        return sum(len(log.tokens) for log in self.follow.choices)


class Custody:
    """The requests in this gateway's care. `async with` begins its rounds."""

    def __init__(
        self, queue: Queue, follower: Follower, cancels: Cancels, metrics: Metrics
    ) -> None:
        self._queue = queue
        self._follower = follower
        self._cancels = cancels
        self._metrics = metrics
        self._holdings: dict[Follow, Holding] = {}
        # How long the followed ones live on when nobody follows them any more, in ms.
        self._keep_ms: dict[str, int] = {}
        # What Redis has not heard yet.
        self._untold: dict[str, int] = {}
        # Set when a drain closes what is still open: the requests go on for other gateways.
        self.is_closing = False
        self._told_at = 0.0
        self._work: list[Background] = []

    async def __aenter__(self) -> Self:
        self._work = [
            Background("custody's rounds", self._rounds),
            Background("custody's recovery", self._recover),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await supervise.end(*self._work)
        with contextlib.suppress(Unavailable):
            await self._tell()

    def hold(self, holding: Holding, timeouts: Timeouts | None = None) -> None:
        """Takes a request in that was admitted here."""
        self._holdings[holding.follow] = holding
        self._keep_ms[holding.spec.request_id] = holding.spec.keep_ms
        if timeouts is not None and timeouts.waiting_ms:
            holding.expires_at = time.monotonic() + timeouts.waiting_ms / 1000

    async def join(self, follow: Follow, head: RequestSpec, arrived_ms: int) -> None:
        """Takes a request in that came by another gateway, or whose client had left: it lives on
        for a while from now on when it is left again.
        """
        rid = follow.request_id
        keep_ms = self._keep_ms[rid] = max(head.keep_ms, KEEP_S * 1000)
        with contextlib.suppress(Unavailable):
            await self._queue.join(rid)
            await self._queue.follow({rid: follow_ms(keep_ms)})
            spec = await self._queue.spec(rid)
            if spec is not None:  # it has not ended
                timeouts = Timeouts(
                    spec.queue_timeout_ms, spec.first_token_timeout_ms, spec.timeout_ms
                )
                self.hold(Holding(follow, spec, arrived_ms), timeouts)
                self._keep_ms[rid] = keep_ms

    def leave(self, follow: Follow, tenant: str, idempotency_key: str = "") -> bool:
        """An answer was closed before its end. True if the request lives on: others follow it here,
        or it is to wait for its client; else it is cancelled.
        """
        rid = follow.request_id
        if rid in self._follower or self.is_closing:
            return True
        keep_ms = self._keep_ms.get(rid, 0)
        if not keep_ms:
            # A Redis that comes back must not be told of it again.
            self._holdings.pop(follow, None)
            self._cancels.add(rid, tenant, idempotency_key)
            return False
        self._untold[rid] = keep_ms
        return True

    async def _rounds(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._forget()
            try:
                await self._tell()
                await self._expire()
            except Unavailable:
                pass  # what Redis does not hear now it hears in the next round

    def _forget(self) -> None:
        now = time.monotonic()
        for follow, holding in list(self._holdings.items()):
            if follow.is_followed:
                holding.forget_at = 0.0
            elif not holding.forget_at:
                holding.forget_at = now + _HOLD_S
            elif now > holding.forget_at:
                del self._holdings[follow]
        for rid in [rid for rid in self._keep_ms if rid not in self._follower]:
            del self._keep_ms[rid]

    async def _tell(self) -> None:
        """Who left at once, who is followed every five seconds, in one round trip."""
        left = dict(self._untold)
        told = dict(left)
        now = time.monotonic()
        is_due = now - self._told_at >= _RENEW_S
        if is_due:
            for rid in self._follower.open_requests():
                told[rid] = follow_ms(self._keep_ms.get(rid, 0))
        if told:
            await self._queue.follow(told)
        for rid, keep_ms in left.items():
            if self._untold.get(rid) == keep_ms:  # else its client has left again meanwhile
                del self._untold[rid]
        if is_due:
            self._told_at = now

    async def _expire(self) -> None:
        now = time.monotonic()
        late = [
            rid
            for follow, holding in self._holdings.items()
            if 0 < holding.expires_at < now
            and follow.is_followed
            and not holding.tokens
            and (rid := follow.request_id)
        ]
        if late:
            await self._queue.expire(late)

    async def _recover(self) -> None:
        async for _ in self._queue.recoveries():
            held = self._most()
            for _ in range(_RESTORE_TRIES):
                try:
                    taken = await self._queue.restore(held)
                except Unavailable:
                    await asyncio.sleep(_RESTORE_RETRY_S)
                    continue
                except Exception:
                    log.exception("requests were not restored", held=len(held))
                    break
                self._metrics.restored(sum(taken), len(taken) - sum(taken))
                log.info("Redis came back", held=len(held), restored=sum(taken))
                break

    def _most(self) -> list[RequestSnapshot]:
        """Of each request what is known most of."""
        best: dict[str, Holding] = {}
        for holding in self._holdings.values():
            known = best.get(holding.spec.request_id)
            if known is None or known.tokens < holding.tokens:
                best[holding.spec.request_id] = holding
        return [holding.held() for holding in best.values() if _is_sound(holding.follow)]


def follow_ms(keep_ms: int) -> int:
    """How long a request that is followed lives on after the death of its gateway: as if its client
    had left, but not before another gateway's round; a plain one for as long as a client needs to
    come back.
    """
    return max(keep_ms, _SHORTEST_MS) if keep_ms else KEEP_S * 1000


def _is_sound(follow: Follow) -> bool:
    logs: list[ChoiceLog] = follow.choices
    return not any(log.diverged for log in logs)
