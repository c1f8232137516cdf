"""Decoders and encoders that round in two ways: an answer that is said to be exact is that of an undisturbed run."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from services.decoder.steps.needs import Needs
from shared.net.channels import open_channel
from tessera.gateway.v1.chat_pb2 import GetRequestRequest
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.simulation.processes import services
from tests.simulation.processes.arithmetic import CONTENT, VirtualWorker, loaded
from tests.simulation.processes.client import RESUMES, Client, DrawnRequest, Reader
from tests.simulation.processes.media_services import picture_values
from tests.simulation.processes.services import Service
from tests.simulation.world import World, run
from tests.support.arithmetic.model import MODEL, first_state, mix, root_of, rounding, state_after

DECODERS = ("one-1", "one-1", "two-2")
ENCODERS = ("left-1", "right-2")
COUNT = 70
TRIES = 40


def numerics_of(service: str) -> str:
    """Of "decoder-3", or what else has such a name; "" of a service that has none."""
    kind, _, number = service.partition("-")
    kinds = {"decoder": DECODERS, "encoder": ENCODERS}.get(kind, ("",))
    return kinds[int(number) % len(kinds)]


class MixedReader(Reader):
    """Each token is one that follows by some of the numerics; `is_exact` is what the status says at the end."""

    is_exact: bool | None = None

    async def read(self) -> None:
        """Also asks for the status."""
        await super().read()
        for _ in range(TRIES if self.state == "served" else 0):
            gateways = [s for s in self._world.services if s.name.startswith("gateway")]
            async with open_channel(f"{self._rng.choice(gateways).name}:1") as line:
                request = GetRequestRequest(request_id=self._request_id)
                try:
                    status = await ChatServiceStub(line).GetRequest(request)
                except grpc.aio.AioRpcError:  # it is being killed, or Redis is
                    await asyncio.sleep(0.3)
                    continue
            if status.status == "completed":  # else Redis has lost its end, which is put back
                self.is_exact = status.exact
                break
        if self.is_exact and not self.is_undisturbed:
            self._broken("is said to be exact and is no undisturbed run's")

    @property
    def is_undisturbed(self) -> bool:
        """Whether all of its tokens are those of one kind of decoder and one of encoder."""
        return any(
            rounding(decoder).generate(values, 0, COUNT, False, self._root) == self.tokens[0]
            for decoder in DECODERS
            for values in self._prompts()
        )

    @property
    def outcome(self) -> str:
        """What became of it, in words."""
        what = "a picture" if self._request.picture else "text"
        return f"{what}, {self.state}, exact {self.is_exact}, undisturbed {self.is_undisturbed}"

    @property
    def _root(self) -> int:
        return first_state(root_of(Needs(), b"", self._request.prompt, {}, content=CONTENT))

    def _prompts(self) -> list[list[int]]:
        """The prompt with what either encoder makes of its picture."""
        prompt, picture = self._request.prompt, self._request.picture
        if not picture:
            return [prompt]
        rows = [picture_values(picture, CONTENT, numerics) for numerics in ENCODERS]
        return [[*prompt[:-1], *values, prompt[-1]] for values in rows]

    def _take(self, choice: int, tokens: list[int]) -> None:
        states = [state_after([*p, *self.tokens[choice]], self._root) for p in self._prompts()]
        for token in tokens:
            right = {rounding(d).next_token(state, choice) for d in DECODERS for state in states}
            if token not in right:
                self._broken(f"{token} after {len(self.tokens[choice])} follows by no numerics")
            states = [mix(state, token) for state in states]
            self.tokens[choice].append(token)

    def _finish(self, choice: int, reason: int) -> None:
        if self._finished[choice] or len(self.tokens[choice]) != COUNT:
            self._broken(f"ended with {len(self.tokens[choice])} tokens")
        self._finished[choice] = True


class MixedWorld(World):
    """Two schedulers, decoders of two kinds and encoders of two; those of one kind are killed together."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.needs = Needs()
        self.keys = [""]

    def service_factories(self) -> list[Callable[[World, int], Service]]:
        one_each = [services.gateway, services.preprocess]
        both = [services.decoder] * len(DECODERS) + [services.encoder] * len(ENCODERS)
        return [*[services.scheduler] * 2, *both, *one_each]

    def make_clients(self) -> list[Client]:
        rng = random.Random(f"{self.seed}/mixed")
        for numerics in (*dict.fromkeys(DECODERS), *ENCODERS):
            at = rng.uniform(1.0, 5.0)
            for service in self.services:
                if numerics_of(service.name) == numerics:
                    self.outside(at, service.kill)
        clients = []
        for number in range(12):
            rng = random.Random(f"{self.seed}/{number}")
            prompt = [rng.randrange(1, MODEL.vocabulary) for _ in range(rng.randint(2, 20))]
            picture = rng.choice([b"", b"a cat", b"a dog", b"a map"])
            drawn = replace(DrawnRequest.plain(prompt, COUNT), kind=RESUMES, picture=picture)
            clients.append(Client(self, number, rng, drawn, rng.uniform(0.3, 5.0), MixedReader))
        return clients

    @property
    def may_blame_others(self) -> bool:
        """So many decoders are killed that a request may have been with three of them."""
        return True

    def load_decoder(self) -> Any:
        process = self.process()
        assert process is not None
        numerics = numerics_of(process.name)
        worker = VirtualWorker(
            services.limits(self.needs, 48),
            self.executors[process],
            lambda tokens: 0.02 + 0.0002 * tokens,
            lambda what: self.broken(f"{process}: {what}"),
            model=rounding(numerics),
        )
        return loaded(worker, 20_000, 200, numerics=numerics)

    def encoder_numerics(self, address: str) -> str:
        return numerics_of(address.partition(":")[0])


def outcomes(seeds: range) -> Counter[str]:
    """What became of the answers, in all of these worlds."""
    found: Counter[str] = Counter()
    for seed in seeds:
        world = MixedWorld(seed)
        outcome = run(world)
        assert outcome.failures == [], seed
        for client in world.clients:
            for reader in client.readers:
                assert isinstance(reader, MixedReader)
                found[reader.outcome] += 1
    return found


def test_an_exact_answer_is_that_of_an_undisturbed_run_and_a_mixed_one_says_so() -> None:
    found = outcomes(range(2))
    for what in ("a picture", "text"):
        assert found[f"{what}, served, exact True, undisturbed True"]
        assert found[f"{what}, served, exact False, undisturbed False"]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_same_in_many_worlds() -> None:
    found = outcomes(range(2, 40))
    assert not [outcome for outcome in found if "exact True, undisturbed False" in outcome]
