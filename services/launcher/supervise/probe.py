"""Asks a process for its condition: a service by its heartbeat, Redis by PING."""

import asyncio
import enum
from pathlib import Path
from typing import Protocol

from shared.net.heartbeat import Question


class Condition(enum.Enum):
    """What a probe found."""

    SILENT = "silent"  # no answer: not started yet, blocked, or ended
    ALIVE = "alive"  # answers that it is not ready
    READY = "ready"


class Probe(Protocol):
    """One way of asking; never raises."""

    async def ask(self, within_s: float) -> Condition:
        """Asks once; an answer that takes longer is none."""
        ...


class HeartbeatProbe:
    """A service's heartbeat, which a thread of its own answers whatever the event loop is busy with."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def ask(self, within_s: float) -> Condition:
        """A process whose event loop is blocked counts as silent."""
        try:
            async with asyncio.timeout(within_s):
                with Question(self._path) as question:
                    beat = await question.answer()
        except (OSError, TimeoutError):
            return Condition.SILENT
        if beat.is_late:
            return Condition.SILENT
        return Condition.READY if beat.is_ready else Condition.ALIVE


class RedisProbe:
    """PING on a unix socket; a Redis that is still loading its file is alive, not ready."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path

    async def ask(self, within_s: float) -> Condition:
        """+PONG is ready."""
        try:
            async with asyncio.timeout(within_s):
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
