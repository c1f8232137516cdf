"""A system of which more is asked than it can do: how many requests are answered in time, through the whole system.

One service of each kind, and a decoder of which eight streams alone take 229 ms a step, as 24 to 32 streams do of a
model of half a billion parameters on two cores, with fewer and larger tokens: 64 tokens of a prompt are 1.8 s of work,
and an answer of 14 tokens is 14 steps. Requests come at random times at a given rate, whatever becomes of those before.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from services.decoder.steps.needs import Needs
from services.decoder.worker.plans.plan import Limits
from services.scheduler.core.scheduler import Scheduler
from shared.net.channels import open_channel
from tessera.gateway.v1.chat_pb2 import CompleteRequest, GenerationOptions, TokenIds
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.simulation.processes import services
from tests.simulation.processes.arithmetic import VirtualWorker, loaded
from tests.simulation.processes.services import Service
from tests.simulation.virtual_loop import Process
from tests.simulation.world import World, run
from tests.support.arithmetic.model import BLOCK_SIZE, MODEL

STREAMS = 8
STEP_S, TOKEN_S = 0.005, 0.028
PROMPT, ANSWER = (33, 95), (8, 20)  # tokens: at least and at most
FIRST_TOKEN_S, EACH_TOKEN_S = 10.0, 0.5  # what "in time" is
_EVENTS = 100_000_000
LIMITS = Limits(
    num_blocks=400,
    num_host_blocks=0,
    max_slots=STREAMS,
    max_model_len=services.LIMITS.max_model_len,
    max_batched_tokens=96,
    max_step_tokens=96,
    block_size=BLOCK_SIZE,
)


def capacity() -> float:
    """Requests a second, where every step has all streams and as much for prompts."""
    tokens = (sum(PROMPT) + sum(ANSWER)) / 2
    of_steps = STEP_S * sum(ANSWER) / 2 / STREAMS
    return 1 / (TOKEN_S * tokens + of_steps)


@dataclass(slots=True)
class Answer:
    """What became of one request. Other times are seconds since it came."""

    came_s: float  # when the request came, since the beginning
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    refused: bool = False  # with a 429
    late: bool = False  # with a 504
    whole: bool = False

    @property
    def in_time(self) -> bool:
        """Whether the first token came in time, and the others as fast as they are to."""
        each_s = (self.last_s - self.first_s) / max(1, self.tokens - 1)
        return self.whole and self.first_s <= FIRST_TOKEN_S and each_s <= EACH_TOKEN_S


class Visitor:
    """A client that asks once."""

    def __init__(self, world: "BusyWorld", number: int, at: float, prompt: list[int], tokens: int):
        self.name = f"visitor-{number}"
        self.answer = Answer(at)
        self.done = False
        self.state = "not begun"
        self.num_tokens = 0
        self._world = world
        self._at = at
        self._process = Process(self.name)
        options = GenerationOptions(
            max_tokens=tokens, ignore_eos=True, return_token_ids=True, seed=1
        )
        self._request = CompleteRequest(token_ids=TokenIds(ids=prompt), options=options)
        self._tokens = tokens

    def start(self) -> None:
        """Schedules the call for its time."""
        self._world.loop.spawn(self._process, self._live())

    async def _live(self) -> None:
        await asyncio.sleep(self._at)
        metadata = [("authorization", f"Bearer {self._world.keys[0]}")]
        if self._world.first_token_timeout_s:
            metadata.append(
                ("x-tessera-first-token-timeout", str(self._world.first_token_timeout_s))
            )
        async with open_channel("gateway-2:1") as line:
            try:
                async for event in ChatServiceStub(line).Complete(self._request, metadata=metadata):
                    self._receive(event)
            except grpc.aio.AioRpcError as error:
                self._failed(error)
        self.done = True

    def _receive(self, event: Any) -> None:
        answer, since = self.answer, self._world.loop.now - self._at
        if event.WhichOneof("event") == "delta" and event.delta.token_ids:
            answer.first_s = answer.first_s or since
            answer.last_s = since
            answer.tokens += len(event.delta.token_ids)
        elif event.WhichOneof("event") == "finished":
            answer.whole = answer.tokens == self._tokens

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        code = error.code()
        self.answer.refused = code is grpc.StatusCode.RESOURCE_EXHAUSTED
        self.answer.late = code is grpc.StatusCode.DEADLINE_EXCEEDED
        if not (self.answer.refused or self.answer.late):
            self._world.broken(f"{self.name} received {code.name}: {error.details()}")


class BusyWorld(World):
    """Requests at `rate` a second for so many seconds; each allows so long for its first token (0: any time).

    `first_token_goal_s` is the scheduler's option; 0 is none.
    """

    def __init__(
        self, rate: float, seconds: float, first_token_timeout_s: float, first_token_goal_s: float
    ) -> None:
        super().__init__(seed=1, faults=False)
        self.core_class = Scheduler
        self.loop.max_events = _EVENTS
        self.needs = Needs()
        self.keys = ["ann's"]
        self.first_token_timeout_s = first_token_timeout_s
        self.first_token_goal_s = first_token_goal_s
        self.answers: list[Answer] = []
        self._rate = rate
        self._seconds = seconds

    def service_factories(self) -> list[Callable[[World, int], Service]]:
        """One of each kind; a prompt of token ids needs no encoder."""
        return [services.scheduler, services.decoder, services.gateway, services.preprocess]

    def make_clients(self) -> list[Any]:
        """As many as come in the time."""
        rng = random.Random("visitors")
        visitors: list[Any] = []
        at = 1.0
        while (at := at + rng.expovariate(self._rate)) < 1.0 + self._seconds:
            prompt = [rng.randrange(1, MODEL.vocabulary) for _ in range(rng.randint(*PROMPT))]
            visitors.append(Visitor(self, len(visitors), at, prompt, rng.randint(*ANSWER)))
        self.answers = [visitor.answer for visitor in visitors]
        return visitors

    def load_decoder(self) -> Any:
        """A decoder that knows what it takes."""
        executor = self.executors[self.process()]
        worker = VirtualWorker(
            LIMITS, executor, lambda tokens: STEP_S + TOKEN_S * tokens, self.broken
        )
        return loaded(worker, 1e6 * STEP_S, 1e6 * TOKEN_S)

    async def _until_calm(self) -> None:
        while not self.failures and not all(client.done for client in self.clients):
            await asyncio.sleep(1.0)


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a load gave."""

    seconds: float
    answers: list[Answer]
    failures: list[str]

    def count(self, of: Callable[[Answer], bool]) -> int:
        """Requests with a property."""
        return sum(map(of, self.answers))

    @property
    def last_s(self) -> float:
        """When the last answer ended, since the beginning."""
        return max(answer.came_s + answer.last_s for answer in self.answers)

    @property
    def in_time_a_second(self) -> float:
        """Requests that were answered in time, of each second in which some came."""
        return self.count(lambda answer: answer.in_time) / self.seconds


def measure(
    times_capacity: float,
    seconds: float,
    *,
    first_token_timeout_s: float = 0.0,
    first_token_goal_s: float = FIRST_TOKEN_S,
) -> Goodput:
    """So many virtual seconds at so many times what the system can do."""
    rate = times_capacity * capacity()
    world = BusyWorld(rate, seconds, first_token_timeout_s, first_token_goal_s)
    failures = run(world).failures
    return Goodput(seconds, world.answers, failures)


def table(times_capacity: float, seconds: float, **options: float) -> str:
    """What a load gave, in a line. `options` as `measure` takes them."""
    found = measure(times_capacity, seconds, **options)
    first = sorted(answer.first_s for answer in found.answers if answer.tokens)
    line = (
        f"x {times_capacity:<4g}{len(found.answers):5} asked, {found.count(lambda a: a.whole):5} answered, "
        f"{found.count(lambda a: a.in_time):5} in time ({found.in_time_a_second:.3f}/s), "
        f"{found.count(lambda a: a.refused):5} refused, {found.count(lambda a: a.late):5} ended late; "
        f"first token median {first[len(first) // 2]:.1f} s, last {first[-1]:.1f} s; "
        f"all over after {found.last_s:.0f} s"
    )
    return "\n".join([line, *(f"FAILED {failure}" for failure in found.failures[:3])])
