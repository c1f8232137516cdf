"""Streams beside a long prompt on a slow decoder, through the whole system: what each step takes is known."""

import random
from collections.abc import Callable
from typing import Any

from services.decoder.steps.needs import Needs
from services.decoder.worker.plans.plan import Limits
from services.scheduler.core.plan import StepPlan
from tests.simulation.processes import services
from tests.simulation.processes.arithmetic import VirtualWorker, loaded
from tests.simulation.processes.client import Client, DrawnRequest
from tests.simulation.processes.services import Service
from tests.simulation.world import World, run
from tests.support.arithmetic.model import BLOCK_SIZE, MODEL

STREAMS = 8
TARGET_S = 0.25  # the default
STEP_S, TOKEN_S = 0.005, 0.010
LIMITS = Limits(
    num_blocks=400,
    num_host_blocks=0,
    max_slots=12,
    max_model_len=services.LIMITS.max_model_len,
    max_batched_tokens=96,
    max_step_tokens=96,
    block_size=BLOCK_SIZE,
)


def seconds(tokens: int) -> float:
    return STEP_S + TOKEN_S * tokens


class SlowWorld(World):
    """One service of each kind, and a decoder that announces `announced` times what a token takes."""

    def __init__(self, announced: float) -> None:
        super().__init__(seed=1, faults=False)
        self.plans: list[StepPlan] = []
        self.needs = Needs()
        self._announced = announced

    def service_factories(self) -> list[Callable[[World, int], Service]]:
        return [
            services.scheduler,
            services.decoder,
            services.gateway,
            services.preprocess,
            services.encoder,
        ]

    def make_clients(self) -> list[Client]:
        lengths = [(2, 80)] * STREAMS + [(95, 20)]
        clients = []
        for number, (prompt, answer) in enumerate(lengths):
            rng = random.Random(number)
            tokens = [rng.randrange(1, MODEL.vocabulary) for _ in range(prompt)]
            begins = 1.0 if number < STREAMS else 3.0
            clients.append(
                Client(self, number, rng, DrawnRequest.plain(tokens, answer, self.keys[0]), begins)
            )
        return clients

    def load_decoder(self) -> Any:
        executor = self.executors[self.process()]
        worker = VirtualWorker(LIMITS, executor, seconds, self.broken)
        return loaded(worker, 1e6 * STEP_S, 1e6 * TOKEN_S * self._announced)

    def planned(self, plan: StepPlan) -> None:
        if plan.row_slot:
            self.plans.append(plan)

    def beside_streams(self) -> list[tuple[StepPlan, int]]:
        """Plans in which the long prompt is computed while all others generate, with its tokens."""
        found = []
        for plan in self.plans:
            rows = plan.rows
            long = [r.count for r in rows if r.start < r.sequence.prompt_len == 95]
            if long and len(rows) == STREAMS + 1:
                found.append((plan, long[0]))
        return found


def test_no_step_holds_up_the_streams_and_the_prompt_is_computed() -> None:
    world = SlowWorld(announced=1.0)
    assert run(world).failures == []
    beside = world.beside_streams()
    assert sum(tokens for _, tokens in beside) == 95
    assert all(seconds(plan.num_tokens) <= TARGET_S for plan, _ in beside)
    assert max(tokens for _, tokens in beside) == 16  # the streams leave 165 ms


def test_a_decoder_that_has_announced_a_tenth_is_soon_known() -> None:
    world = SlowWorld(announced=0.1)
    assert run(world).failures == []
    # The streams alone have shown what a token takes before the prompt came.
    assert all(seconds(plan.num_tokens) <= 1.3 * TARGET_S for plan, _ in world.beside_streams())
