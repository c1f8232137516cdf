"""Which running sequences compute how many tokens in a step, and the blocks that takes."""

from services.scheduler.core.plan import StepPlan
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.sequence import Sequence, SequenceStatus
from services.scheduler.core.state import State

# Of a step's tokens this share stays empty while somebody reads along: a prompt that is computed alone may be a little
# longer without a second step for its last few tokens.
_READERS_SHARE = 17


class Rows:
    """Fills a plan with the rows of running sequences."""

    def __init__(self, state: State, preemption: Preemption) -> None:
        self._state = state
        self._preemption = preemption

    def add(self, plan: StepPlan, budget: int) -> int:
        """Those that are generating come first: a row costs little and somebody is reading along. What is left of the
        budget, a little less if there are such rows, goes to one prompt after the other. Returns what is left then."""
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
        if plan.row_slot:
            budget -= self._state.capacity.max_batched_tokens // _READERS_SHARE
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
        if sequence.beams is not None and sequence.in_flight:
            return 0  # what comes next depends on the answer
        state = self._state
        start = sequence.num_computed_tokens
        count = min(state.media.plannable(sequence, start), limit)
        if count <= 0 or not self._make_room(plan, sequence, start, count):
            return 0
        row = plan.add_row(sequence, start, count)
        sequence.num_computed_tokens = start + count
        state.register(sequence, plan)
        state.media.computed(sequence, sequence.num_computed_tokens)
        if sequence.num_computed_tokens < sequence.num_tokens:
            plan.chunks.append((sequence, sequence.tenure, start + count))
        elif sequence.forks:
            self._fork(plan, row, sequence)
        else:
            self._sample(plan, row, sequence)
            if sequence.beams is None:
                room = len(sequence.blocks) * state.capacity.block_size
                sequence.plain_until = min(room, sequence.length_limit - 1)
        return count

    def _sample(self, plan: StepPlan, row: int, sequence: Sequence) -> None:
        plan.add_sample(row, sequence)
        sequence.num_tokens += 1

    def _fork(self, plan: StepPlan, row: int, sequence: Sequence) -> None:
        """The prompt is computed once for all choices: each samples from the same row and shares the blocks."""
        state = self._state
        self._sample(plan, row, sequence)
        for child in sequence.forks:
            if child.ended:
                continue
            plan.fork(child, sequence)
            plan.edit(child.slot, 0, sequence.blocks)
            state.blocks.hold(sequence.blocks)
            child.blocks = list(sequence.blocks)
            child.block_hashes = list(sequence.block_hashes)
            child.num_computed_tokens = sequence.num_computed_tokens
            child.num_registered = child.num_sealed = sequence.num_registered
            child.num_media_passed = sequence.num_media_passed
            child.num_cached_tokens = sequence.num_cached_tokens
            state.run(child)
            self._sample(plan, row, child)
        sequence.forks = []

    def _make_room(self, plan: StepPlan, sequence: Sequence, start: int, count: int) -> bool:
        """Blocks to write tokens from `start` on, others preempted if it must be. False if that did not help."""
        if not self._own_last(plan, sequence, start):
            return False
        held = len(sequence.blocks)
        missing = self._state.capacity.blocks_for(start + count) - held
        if missing <= 0:
            return True
        if not self._preemption.make_room(plan, sequence, missing):
            return False
        fresh = self._state.blocks.allocate(missing)
        sequence.blocks.extend(fresh)
        plan.edit(sequence.slot, held, fresh)
        return True

    def _own_last(self, plan: StepPlan, sequence: Sequence, start: int) -> bool:
        """A partly filled block that forks share is copied for each that writes to it, but for the last."""
        blocks = self._state.blocks
        index, offset = divmod(start, self._state.capacity.block_size)
        if not offset or blocks.refs(shared := sequence.blocks[index]) == 1:
            return True
        if not self._preemption.make_room(plan, sequence, 1):
            return False
        if blocks.refs(shared) > 1:  # else the others have just been preempted
            (own,) = blocks.allocate(1)
            plan.copy(shared, own)
            plan.edit(sequence.slot, index, [own])
            sequence.blocks[index] = own
            blocks.release([shared])
        return True
