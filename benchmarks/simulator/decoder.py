"""A decoder that obeys plans in virtual time."""

from collections import deque
from dataclasses import dataclass

from services.scheduler.core.budget import Capacity
from services.scheduler.core.plan import StepOutput, StepPlan, StepProgress
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence

_TOKEN = 7  # what every answer consists of
_EMPTY_STEP_S = 0.0003  # a plan that computes nothing


@dataclass(frozen=True)
class Timing:
    """What a decoder takes: a step costs `step_s`, and more for each token and each sequence in it. Seconds."""

    step_s: float = 0.010
    token_s: float = 0.00002
    row_s: float = 0.00005
    lead_s: float = 0.002  # how long before the end of a step the next plan leaves
    fetch_s: float = 0.002  # to pull the embeddings of a picture

    def of(self, tokens: int, rows: int) -> float:
        """A step's time."""
        if not rows:
            return _EMPTY_STEP_S
        return self.step_s + tokens * self.token_s + rows * self.row_s


@dataclass(slots=True, eq=False)
class Flight:
    """When a request came and got its first token."""

    came: float
    first: float = 0.0


class SimulatedDecoder:
    """One decoder with its core, plans one ahead. Whoever drives it calls `send` and `finish` at the right times."""

    def __init__(self, capacity: Capacity, timing: Timing, step_target_s: float = 0.0) -> None:
        """`step_target_s`: that a step may take while sequences decode; 0 is any."""
        self.core = Scheduler(capacity, step_target=1e6 * step_target_s)
        self.core.costs.announced(1e6 * timing.step_s, 1e6 * (timing.token_s + timing.row_s))
        self.draining = False
        self.numerics = ""
        self.timing = timing
        self.ends_at = 0.0  # of the running step
        self.wake_at = 0.0  # when somebody will call `send` for the next plan
        self.busy_s = 0.0
        self.sequence_steps = 0
        self.planning_s = 0.0  # processor time spent on the next plan, if that is measured
        self._plans: deque[StepPlan] = deque()

    def predict(self, tokens: int) -> float:
        """Seconds that a step of so many tokens takes, of as few sequences as can be."""
        return self.timing.of(tokens, 1)

    @property
    def num_plans(self) -> int:
        """The running step and the plan behind it."""
        return len(self._plans)

    def send(self, plan: StepPlan, now: float) -> bool:
        """Takes a plan. True if it begins at once, and `ends_at` says when it will be done."""
        self._plans.append(plan)
        if len(self._plans) > 1:
            return False
        self._begin(now)
        return True

    def finish(self, now: float) -> tuple[StepPlan, StepOutput]:
        """The running step is done; the plan behind it, if there is one, begins: then `ends_at` is later than now."""
        plan = self._plans.popleft()
        if plan.num_tokens:
            took = self.timing.of(plan.num_tokens, len(plan.row_slot))
            self.core.costs.learn(plan.num_tokens, plan.num_pairs, 1e6 * took)
        if self._plans:
            self._begin(now)
        return plan, StepOutput([_TOKEN] * len(plan.sample_slot))

    def _begin(self, now: float) -> None:
        plan = self._plans[0]
        rows = len(plan.row_slot)
        took = self.timing.of(plan.num_tokens, rows)
        self.ends_at = now + took
        if rows:
            self.busy_s += took
            self.sequence_steps += rows

    def answered(self, progress: StepProgress, now: float) -> list[Sequence]:
        """Notes first tokens after the core has completed a step. Returns those that ended."""
        if 0 in progress.starts:
            for sequence, start in zip(progress.sequences, progress.starts, strict=True):
                if start == 0:
                    sequence.payload.first = now
        return [progress.sequences[index] for index in progress.endings]
