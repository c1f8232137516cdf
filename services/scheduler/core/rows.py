"""Which running sequences compute how many tokens in a step, and the blocks that takes."""

from services.scheduler.core.plan import StepPlan
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.sequence import Sequence, SequenceStatus
from services.scheduler.core.state import State


class Rows:
    """Fills a plan with the rows of running sequences."""

    def __init__(self, state: State, preemption: Preemption) -> None:
        self._state = state
        self._preemption = preemption

    def add(self, plan: StepPlan, budget: int) -> int:
        """Those that are generating come first: a row costs little and somebody is reading along. What is left of the
        budget goes to one prompt after the other. Returns what is left then."""
        running = self._state.running
        # Who needs a block goes first, while it can still be taken from someone without a row in this plan.
        others = [s for s in running if s.num_computed_tokens >= s.plain_until]
        plain = [s for s in running if s.num_computed_tokens < s.plain_until]
        for sequence in others:
            if budget > 0 and sequence.num_tokens - sequence.num_computed_tokens == 1:
                budget -= self.schedule(plan, sequence, 1)
        if len(running) < len(others) + len(plain):  # some were preempted
            plain = [s for s in plain if s in running]
        budget -= self._schedule_plain(plan, plain[:budget])
        for sequence in others:
            if budget > 0 and sequence.num_tokens - sequence.num_computed_tokens > 1:
                budget -= self.schedule(plan, sequence, budget)
        return budget

    def _schedule_plain(self, plan: StepPlan, plain: list[Sequence]) -> int:
        """The steady state: one token each, in blocks that are there."""
        plan.add_generating(plain, [s.num_computed_tokens for s in plain])
        for sequence in plain:
            sequence.num_computed_tokens += 1
            sequence.num_tokens += 1
        return len(plain)

    def schedule(self, plan: StepPlan, sequence: Sequence, limit: int) -> int:
        """Gives a running sequence up to `limit` tokens in this plan. Returns how many it got."""
        if sequence.status is not SequenceStatus.RUNNING or sequence.is_certainly_last:
            return 0
        state = self._state
        start = sequence.num_computed_tokens
        count = min(state.media.plannable(sequence, start), limit)
        if count <= 0 or not self._grow(plan, sequence, start + count):
            return 0
        row = plan.add_row(sequence, start, count)
        sequence.num_computed_tokens = start + count
        if sequence.num_computed_tokens == sequence.num_tokens:
            self._sample(plan, row, sequence)
        else:
            plan.chunks.append((sequence, sequence.tenure, start + count))
        state.register(sequence)
        state.media.computed(sequence, sequence.num_computed_tokens)
        return count

    def _sample(self, plan: StepPlan, row: int, sequence: Sequence) -> None:
        plan.add_sample(row, sequence)
        sequence.num_tokens += 1
        room = len(sequence.blocks) * self._state.capacity.block_size
        sequence.plain_until = min(room, sequence.length_limit - 1)

    def _grow(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for `num_tokens`, preempting the last by rank if it must. False if that did not help."""
        blocks = self._state.blocks
        held = len(sequence.blocks)
        missing = self._state.capacity.blocks_for(num_tokens) - held
        if missing <= 0:
            return True
        if not self._preemption.make_room(plan, sequence, missing):
            return False
        fresh = blocks.allocate(missing)
        sequence.blocks.extend(fresh)
        plan.edit(sequence.slot, held, fresh)
        return True
