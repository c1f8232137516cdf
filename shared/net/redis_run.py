"""Which run of Redis this process talks to. After a restart Redis may have lost its last writes; who is told of it puts
them back.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

HOLD_MS = 3_000  # for which nothing is taken, fenced or leased after a restart

log = structlog.get_logger(__name__)

Ask = Callable[..., Awaitable[Any]]


class Runs:
    """The runs known under each prefix of keys. Every new connection greets Redis before it says anything else."""

    def __init__(self) -> None:
        self._scripts: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._restarts: dict[str, int] = {}
        self._changed = asyncio.Event()

    def watch(self, prefix: str, script: str) -> bool:
        """Lets connections greet with `script` under this prefix too. False if they do so already."""
        if prefix in self._scripts:
            return False
        self._scripts[prefix] = script
        self._restarts[prefix] = 0
        return True

    async def greet(self, ask: Ask) -> None:
        """Asks by `ask(*command)` which run this is, and has Redis hold on if it is another one than before."""
        for prefix, script in self._scripts.items():
            answer = await ask("EVAL", script, 1, prefix, self._known.get(prefix, ""), HOLD_MS)
            run_id = str(answer, "ascii")
            known, self._known[prefix] = self._known.get(prefix, ""), run_id
            if known not in ("", run_id):
                log.warning("redis has been restarted", keys=prefix)
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
