"""Asks a child how it is: a room by its heartbeat, Redis by PING."""

import asyncio
import enum
from pathlib import Path
from typing import Protocol

from shared.net.heartbeat import Question

_TIMEOUT_S = 1.0


class Condition(enum.Enum):
    """What a probe found."""

    SILENT = "silent"  # no answer: not up yet, hung, or gone
    ALIVE = "alive"  # answers, and says that it is not ready
    READY = "ready"


class Probe(Protocol):
    """One way of asking; never raises."""

    async def ask(self) -> Condition:
        """Asks once; an answer that takes over a second is none."""
        ...


class HeartbeatProbe:
    """A room's heartbeat, which a thread of its own tells whatever the room is busy with."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def ask(self) -> Condition:
        """A process whose event loop stands still is as silent as one that is gone."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                with Question(self._path) as question:
                    beat = await question.answer()
        except (OSError, TimeoutError):
            return Condition.SILENT
        if beat.is_late:
            return Condition.SILENT
        return Condition.READY if beat.is_ready else Condition.ALIVE


class RedisProbe:
    """PING on a unix socket; loading its file is alive."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path

    async def ask(self) -> Condition:
        """+PONG is ready."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(self._path))
                try:
                    writer.write(b"PING\r\n")
                    answer = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return Condition.SILENT
        if not answer:
            return Condition.SILENT
        return Condition.READY if answer.startswith(b"+PONG") else Condition.ALIVE
