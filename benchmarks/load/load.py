"""When requests are sent: all at once, at a rate (open loop), or a fixed number at a time (closed loop)."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.load.recording import Recording

Ask = Callable[[bytes], Awaitable[Recording]]


@dataclass(frozen=True, slots=True)
class Pacing:
    """`rate` in requests a second, infinite for no waiting; `concurrency` bounds those under way.

    With both, a request that is due waits until another has ended, and counts from when it is sent.
    """

    rate: float = float("inf")
    is_constant: bool = False
    burstiness: float = 1.0
    concurrency: int | None = None

    def delays(self, count: int, seed: int) -> list[float]:
        """Seconds from the start to each request.

        Gaps have the gamma distribution with shape `burstiness` and mean 1/rate: 1 is a Poisson process, less comes in
        bursts, more is steadier.
        """
        if self.rate == float("inf"):
            return [0.0] * count
        if self.is_constant:
            return [number / self.rate for number in range(count)]
        draw = random.Random(seed)
        scale = 1 / (self.rate * self.burstiness)
        delays, at = [], 0.0
        for _ in range(count):
            delays.append(at)
            at += draw.gammavariate(self.burstiness, scale)
        return delays


class Load:
    """A run of requests. `recordings` grows as they end; the progress line reads it."""

    def __init__(self, ask: Ask, bodies: Sequence[bytes], pacing: Pacing, seed: int) -> None:
        self.recordings: list[Recording] = []
        self.num_running = 0
        self.total = len(bodies)
        self._ask = ask
        self._bodies = bodies
        self._pacing = pacing
        self._delays = pacing.delays(len(bodies), seed)

    async def run(self) -> float:
        """Sends everything and waits for the last answer. Returns the seconds that it took."""
        began = time.perf_counter()
        if self._pacing.concurrency is not None and not any(self._delays):
            await self._closed_loop(min(self._pacing.concurrency, self.total))
        else:
            await self._open_loop(began)
        return time.perf_counter() - began

    async def _closed_loop(self, lanes: int) -> None:
        bodies = iter(self._bodies)

        async def lane() -> None:
            for body in bodies:  # shared iterator: each free worker takes the next one
                await self._one(body)

        await asyncio.gather(*(lane() for _ in range(lanes)))

    async def _open_loop(self, began: float) -> None:
        slots = asyncio.Semaphore(self._pacing.concurrency or self.total)

        async def one(body: bytes) -> None:
            async with slots:
                await self._one(body)

        async with asyncio.TaskGroup() as group:
            for body, delay in zip(self._bodies, self._delays, strict=True):
                wait = began + delay - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(body))

    async def _one(self, body: bytes) -> None:
        self.num_running += 1
        self.recordings.append(await self._ask(body))
        self.num_running -= 1
