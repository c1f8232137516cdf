"""The timelines of requests, of what all services have written of them."""

import asyncio
import contextlib
from collections.abc import Collection

from services.gateway.telemetry.traces.request_timeline import RequestTimeline, timeline_of
from shared.errors import Unavailable
from shared.queue.stores.timeline_store import KeptTimeline, TimelineStore, TimelineWriter

# Schedulers write twice a second: the end of a request that has just ended is waited for so long.
_TRIES = 8
_RETRY_S = 0.1


class RequestTimelines:
    """Reads timelines, what this gateway itself has seen included."""

    def __init__(self, store: TimelineStore, writer: TimelineWriter) -> None:
        self._store = store
        self._writer = writer

    async def of(self, request_id: str) -> RequestTimeline | None:
        """The timeline of a request so far; None if there is no such request. Raises Unavailable."""
        with contextlib.suppress(Unavailable):  # the reading says what is wrong
            await self._writer.flush()
        kept = await self._store.read(request_id)
        for _ in range(_TRIES):
            if kept is None or not _lacks_end(kept):
                break
            await asyncio.sleep(_RETRY_S)
            kept = await self._store.read(request_id)
        return None if kept is None else timeline_of(request_id, kept)

    async def of_refusal(self, request_id: str, tenants: Collection[str]) -> RequestTimeline | None:
        """The timeline of a request of one of the tenants that was not accepted; None if there is no such. Raises
        Unavailable."""
        with contextlib.suppress(Unavailable):
            await self._writer.flush()
        kept = await self._store.read_refusal(request_id, tenants)
        return None if kept is None else timeline_of(request_id, kept)


def _lacks_end(kept: KeptTimeline) -> bool:
    """Whether a scheduler has ended it, and has not written that yet."""
    return (
        kept.state == "ended"
        and kept.attempts > 0
        and not any(b'["ended",' in c for c in kept.chunks)
    )
