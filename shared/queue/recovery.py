"""The queue's verbs after a restart of Redis, which may have lost its last writes: put back what is known."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from shared.queue.base import Verbs, key_digest, request_words
from shared.queue.messages import RequestSnapshot, cost_of


class RecoveryVerbs(Verbs):
    """What owners and gateways do while Redis recovers."""

    @property
    def restarts(self) -> int:
        """How often Redis was found to be another run. `recoveries` yields after each."""
        return self._connection.runs.count(self._keys.prefix)

    async def recoveries(self) -> AsyncIterator[None]:
        """Yields once each time Redis has come back as another run: `restore` now, within 3 s.

        Until then nothing is taken, fenced or leased. It is noticed when a connection is made again, so something must
        be asked of Redis now and then, as every service does.
        """
        seen = self._connection.runs.count(self._keys.prefix)
        while True:
            await self._connection.runs.more(self._keys.prefix, seen)
            seen = self._connection.runs.count(self._keys.prefix)
            yield

    async def is_recovering(self) -> bool:
        """Whether Redis came back within the last seconds, and what it has lost may not have been put back yet."""
        (recovering,) = await self._ask([("EXISTS", f"{self._keys.prefix}:recovery")])
        return bool(recovering)

    async def restore(self, held: Sequence[RequestSnapshot], scheduler_id: str = "") -> list[bool]:
        """Puts requests back as far as the caller knows more than Redis, one answer for each.

        With an id: as their owner. A request that is missing or waits becomes the caller's; of two owners the larger
        `own_at` wins. Without: as a gateway, for all it follows. A missing request waits again; an ended one gets its
        ending. A log grows only where the shorter is the beginning of the longer. When the recovery is over, only a
        gateway's missing request is put back, and a request whose owner the caller still is according to Redis.
        False: refused. Redis does not recover (any more), another owner took the request later, its log is another, or
        it has ended. An owner drops it then.
        """
        if not held:
            return []
        # The first call brings the script back too, which Redis has forgotten.
        first = await self._restore(held[0], scheduler_id)
        rest = await asyncio.gather(*(self._restore(h, scheduler_id) for h in held[1:]))
        return [first, *rest]

    async def _restore(self, held: RequestSnapshot, scheduler_id: str) -> bool:
        spec = held.spec
        idem = self._idem(spec.tenant, spec.idempotency or key_digest(held.idempotency_key))
        if len(held.logs) != spec.sampling.n:
            raise ValueError(f"{len(held.logs)} logs for {spec.sampling.n} choices")
        follow_ms = max(held.follow_ms, spec.keep_ms)
        words = request_words(
            spec, idem=idem, prio=held.prio, cost=cost_of(spec), follow_ms=follow_ms
        )
        logs: list[bytes] = []
        for log, ending in zip(held.logs, held.endings, strict=True):
            logs += (log, ending.SerializeToString() if ending is not None else b"")
        answer = await self._scripts.call(
            "restore",
            *self._closing,
            *words,
            scheduler_id,
            held.own_at,
            self._lifetimes.lease_ms,
            held.arrived_ms,
            held.rank or held.arrived_ms * 1000,
            held.prompt_log,
            held.lost_decoders,
            held.content,
            held.numerics,
            int(not held.is_exact),
            *logs,
        )
        return bool(answer)
