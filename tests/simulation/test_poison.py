"""A request that crashes decoders, among others, through the whole system: it ends alone."""

import random
from collections.abc import Callable

import pytest

from services.decoder.steps.needs import Needs
from services.scheduler.core.plan import StepPlan
from tests.simulation.faults import stand_still
from tests.simulation.poison import poison
from tests.simulation.processes import services
from tests.simulation.processes.client import Client, DrawnRequest
from tests.simulation.processes.services import Service
from tests.simulation.redis.model import Hash
from tests.simulation.virtual_loop import Process
from tests.simulation.world import World, run
from tests.support.arithmetic.model import MODEL

OTHERS = 6


class SmallWorld(World):
    """One service of each kind, and requests that are under way together."""

    def __init__(self, request: DrawnRequest | None = None) -> None:
        super().__init__(seed=3, faults=False)
        self.keys = [""]
        self.needs = Needs()
        self.plans: list[list[tuple[str, bool]]] = []  # requests, and whether they must be alone
        self._request = request

    def service_factories(self) -> list[Callable[[World, int], Service]]:
        return [
            services.scheduler,
            services.decoder,
            services.gateway,
            services.preprocess,
            services.encoder,
        ]

    def make_clients(self) -> list[Client]:
        clients = []
        for number in range(OTHERS):
            rng = random.Random(number)
            prompt = [rng.randrange(1, MODEL.vocabulary) for _ in range(5)]
            request = DrawnRequest.plain(prompt, 15 + 15 * number)
            clients.append(Client(self, number, rng, request, 1.0))
        if self._request is not None:
            clients.append(Client(self, OTHERS, random.Random(9), self._request, 1.1))
        return clients

    def planned(self, plan: StepPlan) -> None:
        rows = [(s.request_id, len(s.tokens) < s.isolated_until) for s in plan.row_sequence]
        if rows:
            self.plans.append(rows)

    @property
    def ever_alone(self) -> set[str]:
        """Requests that had to run alone at some time."""
        return {rid for rows in self.plans for rid, is_alone in rows if is_alone}


@pytest.mark.parametrize("dies", [True, False], ids=["the decoder dies", "the step fails"])
@pytest.mark.parametrize("after", [0, 6])
def test_a_request_that_ends_decoders_ends_by_itself(dies: bool, after: int) -> None:
    world = SmallWorld(poison(dies=dies, after=after))
    assert run(world).failures == []
    assert "3 decoders were lost while they ran this request" in world.clients[-1].state
    assert [client.state for client in world.clients[:-1]] == ["served"] * OTHERS
    assert world.poisonings == 3
    # Those who were with it twice ran alone for a while, and then among others again.
    assert len(world.ever_alone) > 1
    was_alone: set[str] = set()
    came_back: set[str] = set()
    for rows in world.plans:
        alone = {rid for rid, is_alone in rows if is_alone}
        assert len(rows) == 1 or not alone
        was_alone |= alone
        came_back |= {rid for rid, _ in rows if len(rows) > 1} & was_alone
    assert came_back


class HangingWorld(SmallWorld):
    """The request makes decoders hang, and their supervisor kills them after that."""

    def __init__(self, schedulers: int) -> None:
        super().__init__(poison(dies=True, after=0))
        self._schedulers = schedulers

    def service_factories(self) -> list[Callable[[World, int], Service]]:
        return super().service_factories() + [services.scheduler] * (self._schedulers - 1)

    def poisoned(self, process: Process, dies: bool) -> None:
        self.poisonings += 1
        process.frozen = True
        for service in self.services:
            if service.process is process:
                self.outside(6.0, service.kill)


@pytest.mark.parametrize("schedulers", [1, 2])
def test_a_request_that_makes_decoders_hang_ends_by_itself(schedulers: int) -> None:
    """Their deaths are known only when it has gone back to the queue."""
    world = HangingWorld(schedulers)
    assert run(world).failures == []
    assert "3 decoders were lost while they ran this request" in world.clients[-1].state
    assert [client.state for client in world.clients[:-1]] == ["served"] * OTHERS
    assert world.poisonings == 3


def test_one_lost_decoder_has_nobody_run_alone() -> None:
    world = SmallWorld()
    decoder = 1
    world.outside(1.15, lambda: world.services[decoder].kill())
    assert run(world).failures == []
    assert [client.state for client in world.clients] == ["served"] * OTHERS
    assert world.ever_alone == set()


@pytest.mark.parametrize("seconds", [0.97, 2.6, 6.0])
def test_a_scheduler_that_stands_still_blames_nobody(seconds: float) -> None:
    """For so long each time: until its decoder is nearly silent to it, ends the stream, or gives the connection up."""
    world = SmallWorld()
    scheduler = 0

    def stop() -> None:
        process = world.services[scheduler].process
        assert process is not None
        stand_still(world, process, seconds, 1, world.outside)

    for number in range(5):
        world.outside(1.15 + number * (seconds + 0.4), stop)
    assert run(world).failures == []
    assert [client.state for client in world.clients] == ["served"] * OTHERS
    assert lost_decoders(world) == {b"0"}


@pytest.mark.parametrize("fault", ["cut", "freeze", "partition"])
def test_a_decoder_that_is_out_of_reach_blames_nobody(fault: str) -> None:
    world = SmallWorld()
    scheduler, decoder = "scheduler-0", "decoder-1"

    def harm() -> None:
        if fault == "partition":
            world.network.partition(scheduler, decoder)
            world.outside(2.5, lambda: world.network.heal(scheduler, decoder))
        elif fault == "freeze":
            process = world.services[1].process
            assert process is not None
            stand_still(world, process, 2.5, 1, world.outside)
        else:
            for end in list(world.network.connections):
                if {end.process.name, end.peer.process.name} == {scheduler, decoder}:
                    world.network.cut(end)

    for number in range(5):
        world.outside(1.15 + 2.8 * number if fault != "cut" else 1.15 + 0.2 * number, harm)
    assert run(world).failures == []
    assert [client.state for client in world.clients] == ["served"] * OTHERS
    assert lost_decoders(world) == {b"0"}


def lost_decoders(world: SmallWorld) -> set[bytes]:
    """What Redis counts for all requests."""
    requests = [value for key, value in world.redis.model.data.items() if b":r:" in key]
    return {request[b"lost_decoders"] for request in requests if isinstance(request, Hash)}


def test_drains_and_lost_schedulers_are_nobodys_fault() -> None:
    world = SmallWorld()
    scheduler, decoder = 0, 1
    for seconds in (1.15, 4.5, 8.0):
        world.outside(seconds, lambda: world.services[scheduler].kill())
    world.outside(6.3, lambda: world.loop.call_soon(world.services[decoder].stop.set))
    assert run(world).failures == []
    assert [client.state for client in world.clients] == ["served"] * OTHERS
    assert lost_decoders(world) == {b"0"}
