"""One simulated run: services, clients and faults drawn from a seed, and what became of it."""

import asyncio
import gc
import hashlib
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from services.decoder.steps.needs import Needs
from services.scheduler.core.plan import StepPlan
from tests.simulation.faults import Faults
from tests.simulation.invariants import Watch, leftovers
from tests.simulation.poison import MortalWorker, draw_poison
from tests.simulation.processes import services
from tests.simulation.processes.arithmetic import ALL_NEEDS, NUMERICS, VirtualExecutor, loaded
from tests.simulation.processes.client import Client
from tests.simulation.processes.network import Network
from tests.simulation.processes.services import Service
from tests.simulation.redis.server import RedisHost
from tests.simulation.surroundings import (
    logging_to,
    model_folder,
    surroundings,
    with_internal_token,
    without_garbage_collection,
)
from tests.simulation.virtual_loop import Process, Stuck, VirtualLoop, current_process
from tests.simulation.watched_core import watched

_CALM_S = 60.0  # within which everything has ended after the last fault
_LAST_CLIENT_S = 4.0
_LOOK_S = 0.5
_POISON = 0.2  # of the runs have a request that crashes decoders
_COLLECT_EVERY = 8  # runs: it takes as long as a run


@dataclass
class Outcome:
    """What a run gave. `digest` is equal for equal runs; no `failures` is what a test wants."""

    seed: int
    failures: list[str]
    digest: str
    seconds: float
    events: int
    requests: int
    tokens: int
    faults: dict[str, int]
    trace: list[str] = field(default_factory=list)


def simulate(seed: int, *, faults: bool = True, keep_trace: bool = False) -> Outcome:
    """Runs a seed."""
    return run(World(seed, faults=faults, keep_trace=keep_trace))


def run(world: "World") -> Outcome:
    """Runs a world to its end."""
    with _nothing_is_awaited():
        outcome = world.run()
        if not world.seed % _COLLECT_EVERY:
            gc.collect()
    return outcome


def collect() -> None:
    """Frees what past worlds left suspended, so that later tests get no warnings about it."""
    with _nothing_is_awaited():
        gc.collect()


@contextmanager
def _nothing_is_awaited() -> Iterator[None]:
    """Suppresses the warnings about coroutines that were still suspended at the end of a world."""
    with warnings.catch_warnings(), mock.patch.object(sys, "unraisablehook", lambda _: None):
        warnings.simplefilter("ignore")
        yield


class World:
    """Everything that one run consists of."""

    def __init__(self, seed: int, *, faults: bool = True, keep_trace: bool = False) -> None:
        self.seed = seed
        self.loop = VirtualLoop()
        self.rng = random.Random(f"{seed}/world")
        self.secrets = random.Random(f"{seed}/secrets")
        self.network = Network(self.loop, random.Random(f"{seed}/network"))
        self.executors: dict[Process | None, Any] = {}
        self.core_class = watched(self)
        self.failures: list[str] = []
        self.lines: list[str] = []
        self._keep_trace = keep_trace
        self._digest = hashlib.blake2b(digest_size=16)
        self.redis: RedisHost
        self.watch: Watch
        self.services: list[Service] = []
        self.clients: list[Client] = []
        self.poisonings = 0  # how often a request has ended a decoder, or a step
        # Of the API; an empty one means that none are in use.
        self.keys = random.Random(f"{seed}/keys").choice([[""], ["ann's", "bob's"]])
        # Of the model that the decoders run.
        self.needs = random.Random(f"{seed}/needs").choice(ALL_NEEDS)
        # For a first token, after 0.4 of which the order changes.
        self.first_token_goal_s = random.Random(f"{seed}/goal").choice([10.0, 0.5, 0.0])
        self._with_faults = faults
        self._nobody = surroundings(self)  # the context of what belongs to no process

    def run(self) -> Outcome:
        """Runs it to its end."""
        return self._nobody.copy().run(self._run)

    def _run(self) -> Outcome:
        with logging_to(self), with_internal_token(), without_garbage_collection():
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self._live())
            except Stuck as error:
                self.broken(str(error))
            finally:
                self.network.over = True
                self.loop.close_suspended()
                asyncio.set_event_loop(None)
                self.loop.close()
        self.failures += self.loop.failures
        tokens = sum(client.num_tokens for client in self.clients)
        return Outcome(
            self.seed,
            self.failures,
            self._digest.hexdigest(),
            self.loop.now,
            self.loop.events,
            len(self.clients),
            tokens,
            self.faults.counts,
            self.lines,
        )

    async def _live(self) -> None:
        self.redis = RedisHost(self.loop, self.network, random.Random(f"{self.seed}/redis"))
        self.watch = Watch(self)
        for number, factory in enumerate(self.service_factories()):
            self.services.append(factory(self, number))
        for service in self.services:
            service.start()
        self.clients = self.make_clients()
        for client in self.clients:
            client.start()
        self.faults = Faults(self, random.Random(f"{self.seed}/faults"), self._with_faults)
        self.faults.start()
        await self._until_calm()

    def service_factories(self) -> list[Callable[["World", int], Service]]:
        """Functions that make the services of this world."""
        rng = self.rng
        factories: list[Callable[[World, int], Service]] = []
        factories += [services.scheduler] * rng.choice([1, 2, 2])
        factories += [services.decoder] * rng.choice([1, 2, 3])
        factories += [services.gateway] * rng.choice([1, 2])
        factories += [services.preprocess] * rng.choice([1, 1, 2])
        factories += [services.encoder] * rng.choice([1, 2])
        return factories

    def make_clients(self) -> list[Client]:
        """The clients of this world."""
        clients = [
            Client(self, number, random.Random(f"{self.seed}/client {number}"))
            for number in range(self.rng.randint(4, 10))
        ]
        rng = random.Random(f"{self.seed}/poison")
        if rng.random() < _POISON and self.needs == Needs():
            begins = rng.uniform(0.3, _LAST_CLIENT_S)
            request = draw_poison(rng, self.keys[0])
            clients.append(Client(self, len(clients), rng, request, begins))
        return clients

    async def _until_calm(self) -> None:
        """Until every client has been served and nothing is left."""
        bound = _LAST_CLIENT_S + _CALM_S
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.failures:
                return
            if not self.faults.over:
                bound = self.loop.now + _CALM_S
                continue
            waiting = [client for client in self.clients if not client.done]
            left = leftovers(self)
            if not waiting and not left:
                return
            if self.loop.now > bound:
                names = ", ".join(f"{c.name} ({c.state})" for c in waiting)
                self.broken(f"{_CALM_S:.0f} s after the last fault: waiting {names}; {left}")
                return

    # What others call

    def process(self) -> Process | None:
        """Whose code is running."""
        return current_process()

    def outside(self, seconds: float, callback: Callable[..., Any], *args: Any) -> None:
        """Has something done later that belongs to no process."""
        self.loop.call_at(self.loop.now + seconds, callback, *args, context=self._nobody)

    @property
    def may_have_lost_requests(self) -> bool:
        """Whether requests may be lost: Redis lost one just accepted, and the gateway that knew it crashed too."""
        return self.redis.lost_writes and self.faults.has_killed_gateway

    @property
    def may_blame_others(self) -> bool:
        """Whether a request without fault may have been ended as poisoned: three decoders died, or failed a step,
        with it by chance. Nothing else may count."""
        return self.faults.killed_decoders + self.poisonings >= 3

    def load_decoder(self) -> Any:
        """Replaces the function that loads a decoder's model."""
        process = self.process()
        assert process is not None
        rng = random.Random(f"{self.seed}/{process.name}")
        slow = rng.choice([0.004, 0.01, 0.02])
        worker = MortalWorker(
            lambda dies: self.poisoned(process, dies),
            services.limits(self.needs, rng.choice([4, 48])),
            self.executors[process],
            lambda tokens: slow * (0.8 + 0.4 * rng.random()) + 0.0002 * tokens,
            lambda what: self.broken(f"{process}: {what}"),
            self.needs,
            accuracy=rng.choice([0.0, 0.05, 0.6, 1.0]),
        )
        return loaded(worker, 1e6 * slow, 200)

    def encoder_numerics(self, address: str) -> str:
        """Of the encoder that listens there."""
        return NUMERICS

    def executor(self) -> Any:
        """Replaces the compute thread of a decoder process."""
        executor = self.executors[self.process()] = VirtualExecutor(self.loop)
        return executor

    def planned(self, plan: StepPlan) -> None:
        """A scheduler has made a plan."""

    def poisoned(self, process: Process, dies: bool) -> None:
        """A request makes a decoder die, or fail a step."""
        self.trace(f"{process} is poisoned")
        self.poisonings += 1
        for service in self.services:
            if dies and service.process is process:
                service.kill()

    def trace(self, line: str) -> None:
        """Something happened: it counts for the digest."""
        text = f"{self.loop.now:9.4f} {line}"
        self._digest.update(text.encode())
        if self._keep_trace:
            self.lines.append(text)

    def note_log(self, method: str, event: dict[str, Any]) -> None:
        """A log line of production code."""
        words = " ".join(f"{k}={v}" for k, v in event.items() if k not in ("event", "exc_info"))
        words = words.replace(str(model_folder()), "the model")  # its name is random
        self.trace(f"{self.process()} {method}: {event.get('event')} {words}")
        if self.network.over:  # said while it is buried
            return
        if method in ("exception", "critical") or event.get("exc_info"):
            self.broken(f"{self.process()} logged {method}: {event}\n{traceback.format_exc()}")

    def broken(self, what: str) -> None:
        """An invariant does not hold."""
        self.trace(f"BROKEN {what}")
        if len(self.failures) < 20:
            self.failures.append(f"at {self.loop.now:.3f} s: {what}")
