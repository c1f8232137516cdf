"""Requests that make any decoder that computes them crash, or fail the whole step."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from services.decoder.worker.plans.plan import Plan
from shared.errors import Internal
from tests.simulation.processes.arithmetic import Deliver, VirtualWorker
from tests.simulation.processes.client import DEADLY, RESUMES, DrawnRequest
from tests.support.arithmetic.model import MODEL

_DIES, _FAILS = 1, 2


def draw_poison(rng: random.Random, key: str) -> DrawnRequest:
    """A poison request, which takes effect at once or after some tokens of its answer."""
    return poison(dies=rng.random() < 0.7, after=rng.choice([0, 0, 3, 9]), key=key)


def poison(*, dies: bool, after: int, key: str = "") -> DrawnRequest:
    """The decoder crashes, or fails the step, when it would compute the token after the first `after` ones."""
    prompt = [*DEADLY, _DIES if dies else _FAILS, 1 + after]
    return replace(DrawnRequest.plain(prompt, 40, key), kind=RESUMES)


class MortalWorker(VirtualWorker):
    """A worker that crashes on poison requests: it calls `strike(dies)`, which ends the process if it `dies`."""

    def __init__(self, strike: Callable[[bool], None], *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._strike = strike
        self._deadly: dict[int, tuple[int, int]] = {}  # slot -> how, and with how many tokens

    def step(self, plan: Plan, deliver: Deliver, queue_us: int = 0) -> None:
        """Does not return from a step with a poison request."""
        for slot in plan.drop.tolist():
            self._deadly.pop(slot, None)
        for new in plan.new:
            tokens = np.frombuffer(new.tokens, "<i4").tolist()
            if tuple(tokens[: len(DEADLY)]) == DEADLY and new.prompt_len == len(DEADLY) + 2:
                how, after = tokens[len(DEADLY) : new.prompt_len]
                self._deadly[new.slot] = how, new.prompt_len + after - 1
        starts = plan.row_start
        if len(plan.row_slack):
            late = self.slots.computed[plan.row_slot] - starts
            starts = starts + np.clip(late, 0, plan.row_slack)
        ends = zip(plan.row_slot.tolist(), (starts + plan.row_count).tolist(), strict=True)
        deadly = [(self._deadly[slot], end) for slot, end in ends if slot in self._deadly]
        struck = [how for (how, from_), end in deadly if end >= from_]
        if not struck:
            super().step(plan, deliver, queue_us)
            return
        self._strike(_DIES in struck)
        if _DIES not in struck:
            raise Internal("STEP_FAILED", "the step failed")

    def reset(self) -> None:
        """Forgets all sequences, poison requests among them."""
        self._deadly.clear()
        super().reset()


assert all(0 < token < MODEL.vocabulary for token in DEADLY)
