"""The latest errors that requests of all gateways have ended with, in Redis: few, and not for long."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.queue.base import Verbs

MOST_ERRORS = 100
KEEP_ERRORS_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class KeptError:
    """One of them, as the gateway wrote it; `at_ms` by the clock of Redis."""

    at_ms: int
    content: dict[str, Any]


class ErrorStore(Verbs):
    """The errors of one model's requests: at most `MOST_ERRORS`, each for an hour. All methods raise Unavailable."""

    async def add(self, errors: Sequence[tuple[dict[str, Any], int]]) -> None:
        """Adds errors, each with how many milliseconds ago it was. Equal ones count once: number them."""
        words = [
            word
            for content, age_ms in errors
            for word in (json.dumps(content, separators=(",", ":")), age_ms)
        ]
        await self._scripts.call("errors", MOST_ERRORS, KEEP_ERRORS_MS, *words)

    async def read(self) -> tuple[float, list[KeptError]]:
        """The time (seconds since 1970 by the clock of Redis), and what is kept, the latest first."""
        commands = [("TIME",), ("ZRANGE", self._keys.errors, 0, -1, "WITHSCORES")]
        (seconds, micros), found = await self._ask([*commands])
        now_s = int(seconds) + int(micros) / 1e6
        kept = [KeptError(round(float(at_ms)), json.loads(content)) for content, at_ms in found]
        oldest_ms = 1000 * now_s - KEEP_ERRORS_MS
        return now_s, [error for error in reversed(kept) if error.at_ms > oldest_ms]
