"""Many inputs at a time to each target, until so many are sent or the time is over."""

import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.fuzz.health import Health
from tests.fuzz.reference import Reference
from tests.fuzz.verdict import Broken

_AT_ONCE = {"rest": 12, "grpc": 6}  # inputs under way at a target; at all others one
_CHECK_S = 5.0
_MOST_KINDS = 20
_SHAPE = 120  # characters that tell one kind from another
_KIND = re.compile(r"[\d]+|0x[0-9a-f]+")  # what differs between failures of one kind


class Target(Protocol):
    """Where inputs are sent."""

    name: str

    async def send(self, draw: random.Random) -> str:
        """Sends one input that is drawn, and names the kind of answer. Raises Broken."""
        ...

    async def close(self) -> None:
        """Lets go of what is held."""
        ...


@dataclass
class Found:
    """What came of a run."""

    answers: dict[str, Counter[str]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # the first of each kind
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        """How many have been answered."""
        return sum(counter.total() for counter in self.answers.values())


class Run:
    """One run over some targets."""

    def __init__(
        self, targets: Sequence[Target], seed: int, reference: Reference, health: Health
    ) -> None:
        self._targets = targets
        self._seed = seed
        self._reference = reference
        self._health = health
        self._found = Found()

    async def run(self, inputs: int, seconds: float) -> Found:
        """Sends at most so many for at most so long."""
        began = time.monotonic()
        each = inputs // len(self._targets)
        async with asyncio.TaskGroup() as group:
            checks = group.create_task(self._check())
            numbers = {target.name: iter(range(each)) for target in self._targets}
            senders = [
                group.create_task(self._send(target, numbers[target.name], began + seconds))
                for target in self._targets
                for _ in range(_AT_ONCE.get(target.name, 1))
            ]
            await asyncio.wait(senders)
            checks.cancel()
        self._found.seconds = time.monotonic() - began
        await self._look()
        return self._found

    async def replay(self, target: Target, number: int) -> Found:
        """Sends one input again."""
        await self._one(target, number)
        await self._look()
        return self._found

    async def _send(self, target: Target, numbers: Iterator[int], until: float) -> None:
        for number in numbers:
            if time.monotonic() > until or len(self._found.broken) >= _MOST_KINDS:
                return
            await self._one(target, number)

    async def _one(self, target: Target, number: int) -> None:
        counter = self._found.answers.setdefault(target.name, Counter())
        try:
            counter[await target.send(random.Random(f"{target.name}/{self._seed}/{number}"))] += 1
        except Broken as error:
            counter["broken"] += 1
            self._report(str(error), f"{target.name}:{self._seed}:{number}: {error}")

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            await self._look()

    async def _look(self) -> None:
        try:
            self._health.check()
            await self._reference.check()
        except Broken as error:
            self._report(str(error), str(error))

    def _report(self, error: str, line: str) -> None:
        kind = _KIND.sub("", error[:_SHAPE])
        if kind not in self._found.broken:
            self._found.broken[kind] = line
            print(f"BROKEN {line}", file=sys.stderr, flush=True)
