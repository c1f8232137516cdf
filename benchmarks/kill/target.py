"""A running system whose processes can be killed."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from benchmarks.kill.victims import Victim
from benchmarks.load.errors import BenchError

WHOLE_WITHIN_S = 120.0
POLL_S = 0.02


@dataclass(slots=True)
class Strike:
    """One fault: the processes that it hit, when (`time.perf_counter`), and the seconds until it was noticed.

    `noticed_s`: by what starts the process again. `missed_s`: by the services that work with it, in their registers in
    Redis (a decoder by its scheduler, a scheduler by the others). None where that is not known.
    """

    victim: Victim
    hit: list[str]
    at: float = field(default_factory=time.perf_counter)
    noticed_s: float | None = None
    missed_s: float | None = None
    whole_s: float | None = None  # until every process was ready again
    # Processes that were not hit and crashed all the same; there must be none.
    bystanders: list[str] = field(default_factory=list)


class Target(Protocol):
    """Processes of a `tessera serve`, or containers."""

    urls: list[str]

    async def strike(self, victim: Victim, draw: Random) -> Strike:
        """Kills, or freezes, one drawn process of each of the victim's services, or begins its load. Returns at once.
        Raises BenchError.
        """
        ...

    async def follow(self, strike: Strike, freeze_s: float) -> None:
        """Fills in the times of the strike; resumes what was frozen, frees the disk and ends the load after `freeze_s`;
        returns when every process is ready again.

        Raises BenchError if that takes too long.
        """
        ...

    async def close(self) -> None:
        """Closes connections and files."""
        ...


async def poll(condition: Callable[[], Awaitable[bool]], within_s: float, what: str) -> float:
    """Polls until the condition holds; returns the seconds that it took. Raises BenchError after a timeout."""
    began = time.perf_counter()
    while not await condition():
        if time.perf_counter() - began > within_s:
            raise BenchError(f"{what} took more than {within_s:.0f} s")
        await asyncio.sleep(POLL_S)
    return time.perf_counter() - began
