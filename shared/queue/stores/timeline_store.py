"""Timelines in Redis: what each process has seen of a request is kept with the request, and as long."""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from shared.environment import monotonic
from shared.errors import Unavailable
from shared.net import supervise
from shared.net.supervise import Background
from shared.queue.base import Verbs
from shared.telemetry.timeline import Chunk, Refusal, Timelines
from tessera.scheduler.v1.queue_pb2 import RequestSpec

# Chunks of a request: what more is written is left out, and the timeline says so.
MOST_CHUNKS = 256
# Timelines of requests that were not accepted, the latest of all gateways: 2 MB of Redis at the most, and usually less
# than one. They are kept as long as others.
MOST_REFUSALS = 1_000
KEEP_REFUSALS_S = 600
# Between two writes: what a process has seen for so long is lost with it.
_WRITE_S = 0.5
# In one call: a script blocks all other clients.
_AT_ONCE = 128
# Chunks that wait for Redis to come back.
_MOST_UNSENT = 4_000
# A measurement of the clock with a longer round trip counts only if the last good one is older than this.
_CLOCK_S = 30.0
_MEASUREMENTS = 3


@dataclass(frozen=True, slots=True)
class KeptTimeline:
    """What Redis has of one request's timeline. Times are ms of Redis TIME, 0 for what has not happened yet."""

    head: RequestSpec
    state: str
    arrived_ms: int
    taken_ms: int
    first_token_ms: int
    ended_ms: int
    attempts: int
    chunks: tuple[bytes, ...]
    left_out: int  # chunks for which there was no room


_FIELDS = (
    *("head", "state", "arrived_ms", "taken_ms", "first_token_ms", "ended_ms", "attempts"),
    "seen",
)


class TimelineStore(Verbs):
    """The timelines of one model's requests. All methods raise Unavailable when Redis is away or refuses to write."""

    async def add(self, chunks: Sequence[Chunk]) -> int:
        """Adds to requests that are known; to others nothing. Returns the time (us, Redis TIME)."""
        words = [word for chunk in chunks for word in chunk]
        return int(await self._scripts.call("timeline", MOST_CHUNKS, *words))

    async def read(self, request_id: str) -> KeptTimeline | None:
        """What is kept of a request; None if there is no such request."""
        key = self._keys.request(request_id)
        (found,) = await self._ask([("HMGET", key, *_FIELDS)])
        head, state, *times, seen = found
        if state is None:
            return None
        arrived, taken, first_token, ended, attempts = (int(time or 0) for time in times)
        count = int(seen or 0)
        names = [f"seen{number}" for number in range(1, min(count, MOST_CHUNKS) + 1)]
        chunks: list[bytes | None] = []
        if names:
            (chunks,) = await self._ask([("HMGET", key, *names)])
        return KeptTimeline(
            head=RequestSpec.FromString(head),
            state=state.decode(),
            arrived_ms=arrived,
            taken_ms=taken,
            first_token_ms=first_token,
            ended_ms=ended,
            attempts=attempts,
            chunks=tuple(filter(None, chunks)),
            left_out=count - len(names),
        )

    async def add_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Adds timelines of requests that were not accepted."""
        words = [word for refusal in refusals for word in refusal]
        await self._scripts.call("refused", MOST_REFUSALS, KEEP_REFUSALS_S, *words)

    async def read_refusal(self, request_id: str, tenants: Collection[str]) -> KeptTimeline | None:
        """What is kept of a request that was not accepted; None where it is not known, or is none of theirs."""
        key = self._keys.refused(request_id)
        (found,) = await self._ask([("HMGET", key, "tenant", "head", "chunk")])
        tenant, head, chunk = found
        if tenant is None or str(tenant, "utf-8") not in tenants:
            return None
        return KeptTimeline(RequestSpec.FromString(head), "refused", 0, 0, 0, 0, 0, (chunk,), 0)

    async def due_traces(self, most: int) -> list[str]:
        """Requests whose traces are due: each is given out once, to one gateway."""
        found = await self._scripts.call("traces", most)
        return [str(request_id, "ascii") for request_id in found]


class TimelineWriter:
    """Writes what a process has seen, twice a second where there is anything. `async with` does so until the end of the
    block, if nothing else calls `run`."""

    def __init__(self, timelines: Timelines, store: TimelineStore) -> None:
        self._timelines = timelines
        self._store = store
        self._turn = asyncio.Lock()
        self._unsent: list[Chunk] = []
        self._refusals: list[Refusal] = []
        self._round_trip_s = float("inf")  # of the measurement that counts
        self._measured_at = 0.0
        self._work: Background | None = None

    async def __aenter__(self) -> Self:
        self._work = Background("timelines", self.run)
        return self

    async def __aexit__(self, *_: object) -> None:
        await supervise.end(self._work)
        with contextlib.suppress(Unavailable):
            await self.flush()

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            if len(self._timelines) or self._unsent or self._refusals:
                with contextlib.suppress(Unavailable):  # it waits for the next turn
                    await self.flush()
            await asyncio.sleep(_WRITE_S)

    async def flush(self) -> None:
        """Writes what there is now. Raises Unavailable; what is not written then is kept, as far as there is room."""
        async with self._turn:
            if self._timelines.clock_us is None or monotonic() - self._measured_at > _CLOCK_S:
                for _ in range(_MEASUREMENTS):  # the best one counts
                    await self._add(())
            self._unsent += self._timelines.take()
            del self._unsent[:-_MOST_UNSENT]
            while self._unsent:
                await self._add(self._unsent[:_AT_ONCE])
                del self._unsent[:_AT_ONCE]
            self._refusals += self._timelines.take_refusals()
            del self._refusals[:-_AT_ONCE]
            if self._refusals:
                await self._store.add_refusals(self._refusals)
                self._refusals.clear()

    async def _add(self, chunks: Sequence[Chunk]) -> None:
        began = monotonic()
        now_us = await self._store.add(chunks)
        ended = monotonic()
        took = ended - began
        if took <= self._round_trip_s or began - self._measured_at > _CLOCK_S:
            self._round_trip_s, self._measured_at = took, ended
            self._timelines.clock_us = now_us - 1e6 * (began + took / 2)
            self._timelines.clock_error_us = 1e6 * took / 2
