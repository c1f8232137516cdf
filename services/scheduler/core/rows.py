"""Which running sequences compute how many tokens in a step, and the blocks that takes."""

from services.scheduler.core.budget import StepBudget
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.sequence import Sequence, SequenceStatus
from services.scheduler.core.state import State


class Rows:
    """Fills a plan with the rows of running sequences."""

    def __init__(self, state: State, preemption: Preemption) -> None:
        self._state = state
        self._preemption = preemption

    def add(self, plan: StepPlan, budget: StepBudget) -> int:
        """Those that are generating come first: a row costs little and somebody is reading along. What the budget then
        gives to prompts goes to one after the other. Returns how many tokens that was at the most."""
        running, preemptions = self._state.running, self._state.preemptions
        taking_part = self._state.turns.among(running)
        # Who needs a block goes first, while it can still be taken from someone without a row in this plan.
        others = [s for s in taking_part if s.num_computed_tokens >= s.plain_until]
        plain = [s for s in taking_part if s.num_computed_tokens < s.plain_until]
        for sequence in others:
            if sequence.num_tokens - sequence.num_computed_tokens == 1:
                self.schedule(plan, sequence, budget)
        if preemptions != self._state.preemptions:
            plain = [s for s in plain if s in running]
        self._schedule_plain(plan, plain[: budget.whole])
        # Beams whose answer is under way generate as well, only not in this step, and so do those whose turn it is not.
        read = plan.row_slot or len(taking_part) < len(running)
        if read or any(s.beams is not None and s.in_flight for s in others):
            budget.limit_prompts()
        most = budget.at(0)
        for sequence in others:
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                self.schedule(plan, sequence, budget)
        return most

    def _schedule_plain(self, plan: StepPlan, plain: list[Sequence]) -> None:
        """The steady state: one token each, in blocks that are there."""
        plan.add_generating(plain, [s.num_computed_tokens for s in plain])
        for sequence in plain:
            sequence.num_computed_tokens += 1
            sequence.num_tokens += 1

    def chunk(self, sequence: Sequence, start: int, budget: StepBudget) -> int:
        """How many tokens from `start` on a sequence may compute. A span that must not be split is not bounded in time:
        it is computed whole as soon as the decoder can take it."""
        state = self._state
        known = state.media.plannable(sequence, start)
        count = min(known, budget.at(start))
        if 0 < count < known and state.capacity.whole_media:
            count = state.media.unsplit(sequence, start, count)
            return count if count <= budget.whole else 0
        return count

    def schedule(self, plan: StepPlan, sequence: Sequence, budget: StepBudget) -> None:
        """Gives a running sequence what it may compute in this plan."""
        if sequence.status is not SequenceStatus.RUNNING or sequence.is_certainly_last:
            return
        if sequence.beams is not None and sequence.in_flight:
            return  # what comes next depends on the answer
        state = self._state
        start = sequence.num_computed_tokens
        count = self.chunk(sequence, start, budget)
        if count <= 0 or not self._make_room(plan, sequence, start, count):
            return
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
