"""What a process has seen of requests: spans of time, gathered in memory until they are written beside each other.

All times that leave a process are by the clock of Redis, in microseconds since 1970: `clock_us` is what is to be added
to this process's monotonic clock, measured at each write (`shared/queue/stores/timeline_store.py`). So services on
several hosts have one clock, as exactly as half a round trip to Redis.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from shared.environment import monotonic

_encode = msgspec.json.Encoder().encode
# Of one request between two writes, and of all requests while Redis is away.
_MOST_OF_ONE = 200
_MOST = 20_000
# Requests that were not accepted and whose timelines are written, of all between two writes; the rest leave none.
_MOST_REFUSALS = 64
_FOR_EVER = -1  # `due_ms` of a request whose trace is not due by what is written of it now

# A name, begin and end (seconds of the monotonic clock, or microseconds of Redis as int), who did it where that is not
# this process, and what is to be said of it.
_Event = tuple[str, float | int, float | int, str, str, dict[str, Any]]
# A request, what is said of it as JSON, and in how many milliseconds its trace is due (-1: not by this).
Chunk = tuple[str, bytes, int]


class Refusal(NamedTuple):
    """The timeline of a request that was not accepted: whose it was, the serialized head of its spec, its chunk."""

    request_id: str
    tenant: str
    head: bytes
    chunk: bytes


class Timelines:
    """The events of the requests that one process works on. Never waits, and never fails a request: what there is no
    room for is counted and left out."""

    def __init__(self, service: str, replica: str) -> None:
        """`service` such as "gateway", `replica` the process's incarnation."""
        self._service, self._replica = service, replica
        self._events: dict[str, list[_Event]] = {}
        self._held: dict[str, list[_Event]] = {}
        # Of requests that were held and not accepted, until it is said how they were refused.
        self._dropped: OrderedDict[str, list[_Event]] = OrderedDict()
        self._refusals: list[tuple[str, str, bytes, list[_Event]]] = []
        self._due_ms: dict[str, int] = {}
        self._left_out: dict[str, int] = {}
        self._count = 0
        self.clock_us: float | None = None  # clock of Redis - own monotonic clock, once it is known
        self.clock_error_us = 0.0

    def __len__(self) -> int:
        """What is yet to be written, or held."""
        return self._count + len(self._due_ms) + len(self._refusals)

    def span(
        self,
        request_id: str,
        name: str,
        began: float | int,
        ended: float | int | None = None,
        *,
        service: str = "",
        replica: str = "",
        **attributes: Any,
    ) -> None:
        """Something took from `began` to `ended` (now): by the monotonic clock in seconds, or as int by that of Redis
        in microseconds. `service` and `replica`: whose work it was, where it was not this process's.
        """
        events = self._held.get(request_id)
        if events is None:
            events = self._events.setdefault(request_id, [])
        if len(events) >= _MOST_OF_ONE or self._count >= _MOST:
            self._left_out[request_id] = self._left_out.get(request_id, 0) + 1
            return
        self._count += 1
        end = monotonic() if ended is None else ended
        events.append((name, began, end, service, replica, attributes))

    def moment(self, request_id: str, name: str, **attributes: Any) -> None:
        """Something happened now."""
        now = monotonic()
        self.span(request_id, name, now, now, **attributes)

    def due(self, request_id: str, after_ms: int) -> None:
        """Its trace may be exported so many milliseconds after what is known of it by now is written."""
        self._due_ms[request_id] = after_ms

    @contextmanager
    def held(self, request_id: str) -> Iterator[None]:
        """Inside of it nothing about the request is written, for Redis does not know it yet. What is raised says that
        it was not accepted: its events are kept for `refused` alone."""
        events = self._held.setdefault(request_id, [])
        try:
            yield
        except BaseException:
            self._held.pop(request_id, None)
            self._count -= len(events)
            self._dropped[request_id] = events
            if len(self._dropped) > _MOST_REFUSALS:
                self._dropped.popitem(last=False)
            raise
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Redis knows the request, if it was held."""
        events = self._held.pop(request_id, None)
        if events:
            self._events.setdefault(request_id, []).extend(events)

    def refused(
        self,
        request_id: str,
        tenant: str,
        head: bytes,
        arrived: float,
        stages: Mapping[str, str],
        **attributes: Any,
    ) -> None:
        """A request of a tenant that arrived then was not accepted, which `attributes` tell of. `stages`: what comes
        after each of its spans, "" being none; that is where it ended. Of too many between two writes nothing is kept.
        """
        events = self._dropped.pop(request_id, [])
        if len(self._refusals) >= _MOST_REFUSALS:
            return
        now = monotonic()
        seen = [event for event in events if event[0] in stages]
        last = seen[-1][0] if seen else ""
        since = seen[-1][2] if seen else arrived
        where = stages[last]
        events = [*events, (where, since, now, "", "", {"refused": True})]
        events.append(("refused", now, now, "", "", {"where": where, **attributes}))
        self._refusals.append((request_id, tenant, head, events))

    def take_refusals(self) -> list[Refusal]:
        """The timelines of requests that were not accepted, as they are written; none before the clock is known."""
        if self.clock_us is None:
            return []
        taken, self._refusals = self._refusals, []
        return [
            Refusal(request_id, tenant, head, self._encoded(events, 0))
            for request_id, tenant, head, events in taken
        ]

    def take(self) -> list[Chunk]:
        """All that is to be written, as it is written; none before the clock is known."""
        if self.clock_us is None:
            return []
        taken, self._events = self._events, {}
        due_ms, self._due_ms = self._due_ms, {}
        left_out, self._left_out = self._left_out, {}
        self._count = sum(map(len, self._held.values()))
        for request_id in due_ms:
            taken.setdefault(request_id, [])
        return [
            (
                request_id,
                self._encoded(events, left_out.get(request_id, 0)),
                due_ms.get(request_id, _FOR_EVER),
            )
            for request_id, events in taken.items()
        ]

    def _encoded(self, events: list[_Event], left_out: int) -> bytes:
        offset = self.clock_us or 0.0
        rows = []
        for name, began, ended, service, replica, attributes in events:
            start = began if isinstance(began, int) else round(1e6 * began + offset)
            end = ended if isinstance(ended, int) else round(1e6 * ended + offset)
            rows.append((name, start, max(0, end - start), attributes, service, replica))
        chunk = {
            "service": self._service,
            "replica": self._replica,
            "clock_error_us": round(self.clock_error_us),
            "left_out": left_out,
            "spans": rows,
        }
        return _encode(chunk)
