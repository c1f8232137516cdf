"""Which run of Redis this process talks to. After a restart Redis may have lost its last writes; schedulers and
gateways put them back.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

RECOVERY_MS = 3_000  # for which nothing is taken, fenced or leased after a restart

log = structlog.get_logger(__name__)

Ask = Callable[..., Awaitable[Any]]


class Runs:
    """The run of Redis last seen under each prefix of keys. Every new connection checks it before its first command."""

    def __init__(self) -> None:
        self._scripts: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._restarts: dict[str, int] = {}
        self._changed = asyncio.Event()

    def add(self, prefix: str, script: str) -> bool:
        """Checks this prefix by `script` too. False if it is checked already."""
        if prefix in self._scripts:
            return False
        self._scripts[prefix] = script
        self._restarts[prefix] = 0
        return True

    async def check(self, ask: Ask) -> None:
        """Runs the scripts by `ask(*command)`. They pause the queue if Redis is another run than before."""
        for prefix, script in self._scripts.items():
            answer = await ask("EVAL", script, 1, prefix, self._known.get(prefix, ""), RECOVERY_MS)
            run_id = str(answer, "ascii")
            known, self._known[prefix] = self._known.get(prefix, ""), run_id
            if known not in ("", run_id):
                log.warning("Redis has been restarted", keys=prefix)
                self._restarts[prefix] += 1
                self._changed.set()
                self._changed = asyncio.Event()

    def count(self, prefix: str) -> int:
        """Restarts seen so far."""
        return self._restarts[prefix]

    async def more(self, prefix: str, than: int) -> None:
        """Waits until more than so many restarts were seen."""
        while self._restarts[prefix] <= than:
            await self._changed.wait()
