"""The requests that this gateway follows. It renews their leases in Redis, ends those whose waiting
time is over where no scheduler does, and restores them when Redis comes back without its last
seconds.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Self

import structlog

from services.gateway.admission.request_options import KEEP_S, Timeouts
from services.gateway.following.cancels import Cancels
from services.gateway.following.choice_log import ChoiceLog
from services.gateway.following.follower import Follow, Follower
from services.gateway.telemetry.metrics.metrics import Metrics
from services.gateway.timings import USUAL, Timings
from shared.environment import monotonic
from shared.errors import Unavailable
from shared.net import supervise
from shared.net.supervise import Background
from shared.queue import Queue, RequestSnapshot
from tessera.scheduler.v1.queue_pb2 import RequestSpec

log = structlog.get_logger(__name__)

_TICK_S = 1.0
# A request can be restored for so long after its end, or after its last client here has left.
_HOLD_S = 10.0
# The shortest lease of a followed request; renewed every `Timings.renew_s`.
_SHORTEST_MS = 15_000
_RESTORE_TRIES = 10
_RESTORE_RETRY_S = 0.2


@dataclass(slots=True)
class HeldRequest:
    """One followed request, with everything that its place in the queue is restored from."""

    follow: Follow
    spec: RequestSpec
    arrived_ms: int
    prio: str = "interactive"
    rank: int = 0
    idempotency_key: str = ""
    # By the local monotonic clock: when its waiting time is over, 0 for never; when it may be forgotten.
    expires_at: float = 0.0
    forget_at: float = 0.0

    def snapshot(self) -> RequestSnapshot:
        """What `Queue.restore` takes."""
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
            content=follow.content,
            numerics=follow.numerics,
            is_exact=follow.is_exact,
        )

    @property
    def tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(len(log.tokens) for log in self.follow.choices)


class HeldRequests:
    """The requests that this gateway follows. `async with` starts the background work."""

    def __init__(
        self,
        queue: Queue,
        follower: Follower,
        cancels: Cancels,
        metrics: Metrics,
        timings: Timings = USUAL,
    ) -> None:
        self._queue = queue
        self._follower = follower
        self._cancels = cancels
        self._metrics = metrics
        self._renew_s = timings.renew_s
        self._held: dict[Follow, HeldRequest] = {}
        # Request id to the milliseconds that it lives on when nobody follows it any more.
        self._keep_ms: dict[str, int] = {}
        # Request id to the same, of requests that were left since the last report.
        self._pending: dict[str, int] = {}
        # Set when a shutdown closes open answers: their requests go on, for other gateways.
        self.is_closing = False
        self._reported_at = 0.0
        self._work: list[Background] = []

    async def __aenter__(self) -> Self:
        self._work = [
            Background("held requests", self._rounds),
            Background("restoring requests", self._recover),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await supervise.end(*self._work)
        with contextlib.suppress(Unavailable):
            await self._report()

    def named(self, client_id: str, tenant: str) -> list[str]:
        """The ids of a tenant's requests that are followed here and have this id in their bodies."""
        return [
            held.spec.request_id
            for held in self._held.values()
            if held.spec.reply.client_id == client_id and held.spec.tenant == tenant
        ]

    def hold(self, request: HeldRequest, timeouts: Timeouts | None = None) -> None:
        """Holds a request that was admitted here."""
        self._held[request.follow] = request
        self._keep_ms[request.spec.request_id] = request.spec.keep_ms
        if timeouts is not None and timeouts.waiting_ms:
            request.expires_at = monotonic() + timeouts.waiting_ms / 1000

    async def join(self, follow: Follow, head: RequestSpec, arrived_ms: int) -> None:
        """Holds a request that was admitted by another gateway, or whose client had left: from now
        on it lives on for a while when its client leaves.
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
                self.hold(HeldRequest(follow, spec, arrived_ms), timeouts)
                self._keep_ms[rid] = keep_ms

    def leave(self, follow: Follow, tenant: str, idempotency_key: str = "") -> bool:
        """Called for an answer that was closed before its end. Returns True if the request lives on,
        because others follow it here or it waits for its client; else cancels it.
        """
        rid = follow.request_id
        if rid in self._follower or self.is_closing:
            return True
        keep_ms = self._keep_ms.get(rid, 0)
        if not keep_ms:
            # It must not be restored to a Redis that comes back.
            self._held.pop(follow, None)
            self._cancels.add(rid, tenant, idempotency_key)
            return False
        self._pending[rid] = keep_ms
        return True

    async def _rounds(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._forget()
            try:
                await self._report()
                await self._expire()
            except Unavailable:
                pass  # the next round reports it

    def _forget(self) -> None:
        now = monotonic()
        for follow, request in list(self._held.items()):
            if follow.is_followed:
                request.forget_at = 0.0
            elif not request.forget_at:
                request.forget_at = now + _HOLD_S
            elif now > request.forget_at:
                del self._held[follow]
        for rid in [rid for rid in self._keep_ms if rid not in self._follower]:
            del self._keep_ms[rid]

    async def _report(self) -> None:
        """Tells Redis how long requests live on: those that were left, and every `Timings.renew_s` all
        that are followed.
        """
        left = dict(self._pending)
        leases = dict(left)
        now = monotonic()
        is_due = now - self._reported_at >= self._renew_s
        if is_due:
            for rid in self._follower.open_requests():
                leases[rid] = follow_ms(self._keep_ms.get(rid, 0))
        if leases:
            await self._queue.follow(leases)
        for rid, keep_ms in left.items():
            if self._pending.get(rid) == keep_ms:  # else its client has left again meanwhile
                del self._pending[rid]
        if is_due:
            self._reported_at = now

    async def _expire(self) -> None:
        now = monotonic()
        late = [
            rid
            for follow, request in self._held.items()
            if 0 < request.expires_at < now
            and follow.is_followed
            and not request.tokens
            and (rid := follow.request_id)
        ]
        if late:
            await self._queue.expire(late)

    async def _recover(self) -> None:
        async for _ in self._queue.recoveries():
            held = self._snapshots()
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
                log.info("restored requests", requests=len(held), refused=len(held) - sum(taken))
                break

    def _snapshots(self) -> list[RequestSnapshot]:
        """Of each request the snapshot with the most tokens."""
        best: dict[str, HeldRequest] = {}
        for request in self._held.values():
            known = best.get(request.spec.request_id)
            if known is None or known.tokens < request.tokens:
                best[request.spec.request_id] = request
        return [request.snapshot() for request in best.values() if _is_sound(request.follow)]


def follow_ms(keep_ms: int) -> int:
    """Milliseconds that a followed request lives on after the loss of its gateway: as many as after
    its client has left, but at least _SHORTEST_MS; KEEP_S for one without keep_ms.
    """
    return max(keep_ms, _SHORTEST_MS) if keep_ms else KEEP_S * 1000


def _is_sound(follow: Follow) -> bool:
    logs: list[ChoiceLog] = follow.choices
    return not any(log.diverged for log in logs)
