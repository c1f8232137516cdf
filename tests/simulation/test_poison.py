"""A request that crashes decoders, among others, through the whole system: it ends alone."""

import random
from collections.abc import Callable

import pytest

from services.decoder.models.needs import Needs
from services.scheduler.core.plan import StepPlan
from tests.simulation.poison import poison
from tests.simulation.processes import services
from tests.simulation.processes.client import Client, DrawnRequest
from tests.simulation.processes.services import Service
from tests.simulation.redis.model import Hash
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


def test_one_lost_decoder_has_nobody_run_alone() -> None:
    world = SmallWorld()
    decoder = 1
    world.outside(1.15, lambda: world.services[decoder].kill())
    assert run(world).failures == []
    assert [client.state for client in world.clients] == ["served"] * OTHERS
    assert world.ever_alone == set()


def test_drains_and_lost_schedulers_are_nobodys_fault() -> None:
    world = SmallWorld()
    scheduler, decoder = 0, 1
    for seconds in (1.15, 4.5, 8.0):
        world.outside(seconds, lambda: world.services[scheduler].kill())
    world.outside(6.3, lambda: world.loop.call_soon(world.services[decoder].stop.set))
    assert run(world).failures == []
    assert [client.state for client in world.clients] == ["served"] * OTHERS
    requests = [value for key, value in world.redis.model.data.items() if b":r:" in key]
    assert {request[b"lost_decoders"] for request in requests if isinstance(request, Hash)} == {
        b"0"
    }
