"""A fine-tune is rolled out under the name of its predecessor, decoder by decoder, while other things go wrong."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from services.decoder.steps.needs import Needs
from tests.simulation.processes import services
from tests.simulation.processes.arithmetic import VirtualWorker, loaded
from tests.simulation.processes.client import RESUMES, Client, DrawnRequest, Reader
from tests.simulation.processes.services import Service
from tests.simulation.world import World, run
from tests.support.arithmetic.model import MODEL

BEFORE, AFTER = b"before the change", b"after the change"
DECODERS = 3
FIRST_S, BETWEEN_S = 1.5, 0.7  # when the first decoder is replaced, and until the next one is
CHANGED = "begun with weights that no decoder has any more"


class RolloutReader(Reader):
    """Its answer is, from the first token to the last, that of one of the two models, or ends with the error for it."""

    models: tuple[
        DrawnRequest, DrawnRequest
    ]  # the same request, and what the old and the new model say

    def _take(self, choice: int, tokens: list[int]) -> None:
        said = self.tokens[choice] + tokens
        for request in self.models:
            if request.expected[choice][: len(said)] == said:  # all of it
                self._request = request
                break
        super()._take(choice, tokens)

    def _goes_on_after(self, error: grpc.aio.AioRpcError) -> bool:
        if error.code() is grpc.StatusCode.ABORTED and CHANGED in (error.details() or ""):
            if not any(self.tokens):
                self._broken("an answer without a token cannot have been begun by another model")
            self.state = "changed"
            return False
        return super()._goes_on_after(error)

    @property
    def outcome(self) -> str:
        """How it ended, and whose tokens it has."""
        whose = "new" if self._request is self.models[1] else "old"
        return f"{self.state}, {whose}"


class RolloutWorld(World):
    """Two of all services and three decoders; each is killed once, and comes back with the other weights."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.needs = Needs()
        self.keys = [""]
        self._loads = 0

    def service_factories(self) -> list[Callable[[World, int], Service]]:
        one_each = [services.gateway, services.preprocess, services.encoder]
        return [*[services.scheduler] * 2, *[services.decoder] * DECODERS, *one_each]

    def make_clients(self) -> list[Client]:
        decoders = [s for s in self.services if s.name.startswith("decoder")]
        for number, service in enumerate(decoders):
            self.outside(FIRST_S + BETWEEN_S * number, service.kill)
        clients = []
        for number in range(14):
            rng = random.Random(f"{self.seed}/{number}")
            prompt = [rng.randrange(1, MODEL.vocabulary) for _ in range(rng.randint(2, 20))]
            old, new = (
                replace(DrawnRequest.plain(prompt, 90, content=content), kind=RESUMES)
                for content in (BEFORE, AFTER)
            )
            client = Client(self, number, rng, old, rng.uniform(0.3, 5.0), RolloutReader)
            for reader in client.readers:
                assert isinstance(reader, RolloutReader)
                reader.models = old, new
            clients.append(client)
        return clients

    @property
    def may_blame_others(self) -> bool:
        """So many decoders are killed that a request may have been with three of them."""
        return True

    def load_decoder(self) -> Any:
        process = self.process()
        assert process is not None
        self._loads += 1
        content = BEFORE if self.loop.now < FIRST_S else AFTER
        worker = VirtualWorker(
            services.limits(self.needs, 48),
            self.executors[process],
            lambda tokens: 0.02 + 0.0002 * tokens,
            lambda what: self.broken(f"{process}: {what}"),
        )
        return loaded(worker, 20_000, 200, content)


def outcomes(seeds: range) -> Counter[str]:
    """How the answers ended, in all of these worlds."""
    found: Counter[str] = Counter()
    for seed in seeds:
        world = RolloutWorld(seed)
        outcome = run(world)
        assert outcome.failures == [], seed
        for client in world.clients:
            for reader in client.readers:
                assert isinstance(reader, RolloutReader)
                found[reader.outcome] += 1
    return found


def test_no_answer_goes_on_with_other_weights() -> None:
    found = outcomes(range(3))
    # The first two ends are what a rollout should be, the third is the one that replaces a silent mixture.
    assert found["served, old"] and found["served, new"] and found["changed, old"]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_no_answer_goes_on_with_other_weights_in_many_worlds() -> None:
    assert outcomes(range(3, 40))["changed, old"]
