"""Server-sent events, parsed from a body that arrives in pieces. Source: HTML Living Standard, 9.2.6."""

import json
import time
from dataclasses import dataclass
from typing import Any

_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its id (empty if it has none), its object, and when it was read (`time.perf_counter`)."""

    id: str
    data: dict[str, Any]
    at: float


class EventParser:
    """Parses a body piece by piece. An event that is not complete at the end of the stream is dropped."""

    def __init__(self) -> None:
        self.is_done = False  # [DONE] has come
        self._rest = b""
        self._id = ""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[Event]:
        """The events that this piece completes. Raises ValueError for data that is no JSON object."""
        now = time.perf_counter()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            event = self._line(line.rstrip(b"\r"), now)
            if event is not None:
                events.append(event)
        return events

    def _line(self, line: bytes, now: float) -> Event | None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"id:"):
            self._id = line[3:].strip().decode()
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            if data == _DONE:
                self.is_done = True
                return None
            content = json.loads(data)
            if not isinstance(content, dict):
                raise ValueError("the data of an event is no JSON object")
            return Event(self._id, content, now)
        return None
