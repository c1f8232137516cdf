"""Who gives up its blocks when they run out, and how it gets them back."""

from collections.abc import Iterable
from enum import Enum

from services.scheduler.core.budget import Costs
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.state import State


class PreemptionMode(Enum):
    """What becomes of computed tokens whose blocks are taken."""

    AUTO = "auto"  # whichever is expected to cost less
    RECOMPUTE = "recompute"  # thrown away
    SWAP = "swap"  # saved in host memory, as long as there is room


class Preemption:
    """Takes blocks from the last by rank of those without a row in the plan: what is planned must keep its blocks.

    A preempted sequence stays known: history and slot are kept. It comes back by being computed again, or by moving
    its blocks back in.
    """

    def __init__(self, state: State, mode: PreemptionMode, costs: Costs) -> None:
        self._state = state
        self._mode = mode
        self._costs = costs

    def make_room(self, plan: StepPlan, sequence: Sequence, missing: int) -> bool:
        """Preempts until so many blocks are free. False if the sequence was itself the last, or nobody is left."""
        while self._state.blocks.num_free < missing:
            victim = self._take_last(plan, self._state.running)
            if victim is None or victim is sequence:
                return False
        return True

    def take_beam(self, plan: StepPlan) -> bool:
        """Preempts the last of the beams, which may hold all blocks between them and wait for one that has none."""
        beams = [s for s in self._state.running if s.beams is not None]
        return self._take_last(plan, beams) is not None

    def _take_last(self, plan: StepPlan, among: Iterable[Sequence]) -> Sequence | None:
        planned = set(plan.row_sequence).union(plan.sample_sequence)
        candidates = [s for s in among if s not in planned]
        if not candidates:
            return None
        victim = max(candidates, key=self._state.policy)
        self._preempt(plan, victim)
        return victim

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        state = self._state
        state.preemptions += 1
        state.settle(sequence)  # so that it can find again what it gives up
        computed = state.capacity.blocks_for(sequence.num_computed_tokens)
        if self._swaps(sequence, computed):
            state.swaps += 1
            host = state.host.allocate(computed)
            plan.swap_out_device += sequence.blocks[:computed]
            plan.swap_out_host += host
            state.park(sequence, host)
        else:
            state.lose_blocks(sequence)
        plan.edit(sequence.slot, 0, [])

    def _swaps(self, sequence: Sequence, blocks: int) -> bool:
        if self._mode is PreemptionMode.RECOMPUTE or not 0 < blocks <= self._state.host.num_free:
            return False
        if self._mode is PreemptionMode.SWAP:
            return True
        there_and_back = 2 * blocks * self._costs.of_block
        return there_and_back <= sequence.num_computed_tokens * self._costs.of_token
