"""Who gives up its blocks when they run out."""

from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.state import State


class Preemption:
    """Takes blocks from the last by rank of those without a row in the plan: what is planned must keep its blocks.

    A preempted sequence stays known: history and slot are kept, and it is computed again later.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def make_room(self, plan: StepPlan, sequence: Sequence, missing: int) -> bool:
        """Preempts until so many blocks are free. False if the sequence was itself the last, or nobody is left."""
        while self._state.blocks.num_free < missing:
            victim = self._last_outside(plan)
            if victim is None:
                return False
            self._preempt(plan, victim)
            if victim is sequence:
                return False
        return True

    def _last_outside(self, plan: StepPlan) -> Sequence | None:
        planned = set(plan.row_sequence)
        candidates = [s for s in self._state.running if s not in planned]
        return max(candidates, key=self._state.policy) if candidates else None

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        self._state.preemptions += 1
        self._state.lose_blocks(sequence)
        plan.edit(sequence.slot, 0, [])
