"""Faults drawn from the seed: when, of which process, for how long."""

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.processes import services
from tests.simulation.processes.services import Service
from tests.simulation.virtual_loop import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

_FIRST_S, _LAST_S = 0.5, 6.0
_SILENT_S = 5.0  # after which connections to a frozen process are given up


_BETWEEN_S = 0.15  # that a process runs between two times that it stands still


def stand_still(
    world: "World",
    process: Process,
    seconds: float,
    times: int,
    at: Callable[[float, Callable[[], None]], None],
) -> None:
    """Freezes a process, and wakes it; so many times in a row. `at(seconds, what)` has something done later."""
    process.frozen = True
    world.outside(_SILENT_S, world.network.give_up_silent)

    def wake() -> None:
        world.trace(f"{process} wakes")
        world.loop.resume(process)
        if times > 1:
            at(_BETWEEN_S, again)

    def again() -> None:
        if process.alive and not process.frozen:
            stand_still(world, process, seconds, times - 1, at)

    at(seconds, wake)


class Faults:
    """All faults of a run; `over` when the last one has been undone."""

    def __init__(self, world: "World", rng: random.Random, enabled: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.has_killed_gateway = False
        self.killed_decoders = 0
        self.has_kept_pictures_away = False  # a decoder from what an encoder has made for it
        self._world = world
        self._rng = rng
        self._pending = 0
        self._enabled = enabled

    @property
    def over(self) -> bool:
        """Whether nothing more will go wrong."""
        return not self._pending

    def start(self) -> None:
        """Schedules all of them."""
        if not self._enabled:
            return
        kinds: list[Callable[[], None]] = [
            self._kill,
            self._kill,
            self._freeze,
            self._stand_still,
            self._cut,
            self._slow,
            self._part,
            self._kill_redis,
            self._freeze_redis,
            self._drain,
            self._scale,
        ]
        if self._rng.random() < 0.15:  # one kind alone, again and again
            kinds = [self._rng.choice(kinds)]
        count = self._rng.choice([1, 2, 3, 4, 6, 8, 14])
        for _ in range(count):
            self._at(self._rng.uniform(_FIRST_S, _LAST_S), self._rng.choice(kinds))

    def _at(self, seconds: float, what: Callable[[], None]) -> None:
        self._pending += 1

        def do() -> None:
            self._pending -= 1
            what()

        self._world.outside(seconds, do)

    def _note(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        self._world.trace(f"FAULT {kind} {what}")

    def _service(self) -> Service:
        return self._rng.choice(self._world.services)

    def _kill(self) -> None:
        service = self._service()
        if service.runs:
            self._note("kill", service.name)
            self.has_killed_gateway |= service.name.startswith("gateway")
            self.killed_decoders += service.name.startswith("decoder")
            service.kill()

    def _freeze(self) -> None:
        service = self._service()
        process = service.process
        if not service.runs or process is None or process.frozen:
            return
        seconds = self._rng.choice([0.2, 1.0, 2.5, 4.0, 7.0])
        self._note("freeze", f"{service.name} for {seconds} s")
        stand_still(self._world, process, seconds, 1, self._at)

    def _stand_still(self) -> None:
        """A scheduler that gets the processor now and then only, as under SIGSTOP and SIGCONT: long enough for its
        decoders to end their streams, or just not."""
        schedulers = [s for s in self._world.services if s.name.startswith("scheduler")]
        service = self._rng.choice(schedulers)
        process = service.process
        if not service.runs or process is None or process.frozen:
            return
        stops, seconds = self._rng.choice([3, 6, 10]), self._rng.choice([0.8, 0.97, 1.3, 2.1, 2.6])
        self._note("stand still", f"{service.name}, {stops} times for {seconds} s")
        stand_still(self._world, process, seconds, stops, self._at)

    def _cut(self) -> None:
        network = self._world.network
        ends = [e for e in network.connections if not e.process.name.startswith("client")]
        if ends:
            end = self._rng.choice(ends)
            self._note("cut", f"{end.process} to {end.peer.process}")
            network.cut(end)

    def _pair(self) -> tuple[str, str]:
        names = [service.name for service in self._world.services] + ["redis"]
        one, other = self._rng.sample(names, 2)
        return one, other

    def _slow(self) -> None:
        one, other = self._pair()
        pair, seconds = frozenset((one, other)), self._rng.choice([0.02, 0.2, 0.8])
        self._note("delay", f"{one} and {other} by {seconds} s")
        self._world.network.slow[pair] = seconds
        self._at(self._rng.uniform(0.5, 3.0), lambda: self._no_longer_slow(pair))

    def _no_longer_slow(self, pair: frozenset[str]) -> None:
        self._world.network.slow.pop(pair, None)

    def _part(self) -> None:
        one, other = self._pair()
        if {name.partition("-")[0] for name in (one, other)} == {"decoder", "encoder"}:
            self.has_kept_pictures_away = True
        seconds = self._rng.choice([0.3, 1.5, 3.0, 7.0])
        self._note("partition", f"{one} and {other} for {seconds} s")
        self._world.network.partition(one, other)
        self._at(seconds, lambda: self._world.network.heal(one, other))

    def _kill_redis(self) -> None:
        redis = self._world.redis
        if not redis.process.alive:
            return
        lost_ms = self._rng.choice([0, 0, 5, 50, 400, 1000])
        undone = redis.kill(lost_ms)
        self._note("kill", f"redis, {lost_ms} ms and {undone} writes lost")
        self._world.watch.rolled_back()

        def start() -> None:
            self._world.trace("redis starts")
            redis.start()

        self._at(self._rng.uniform(0.05, 2.0), start)

    def _freeze_redis(self) -> None:
        redis = self._world.redis
        process = redis.process
        if not process.alive or process.frozen:
            return
        seconds = self._rng.choice([0.3, 1.0, 3.0, 6.0])
        self._note("freeze", f"redis for {seconds} s")
        process.frozen = True

        def wake() -> None:
            self._world.trace("redis wakes")
            self._world.loop.resume(process)

        self._at(seconds, wake)

    def _scale(self) -> None:
        """One decoder more, or one less for good."""
        decoders = [r for r in self._world.services if r.name.startswith("decoder") and r.wanted]
        if len(decoders) > 1 and self._rng.random() < 0.5:
            service = self._rng.choice(decoders)
            self._note("scale", f"{service.name} away")
            service.wanted = False
            if service.runs:
                assert service.process is not None
                self._world.loop.call_in(service.process, service.stop.set)
        else:
            service = services.decoder(self._world, len(self._world.services))
            self._note("scale", f"{service.name} comes")
            self._world.services.append(service)
            service.start()

    def _drain(self) -> None:
        service = self._service()
        if service.runs:
            self._note("drain", service.name)
            assert service.process is not None
            self._world.loop.call_in(service.process, service.stop.set)
