"""Which sequences of one decoder compute which of their tokens in a step, and who gives up blocks for it.

Prefill and decode are not told apart: each step gives a sequence some of `num_tokens - num_computed_tokens`, and
chunked prefill, prefix cache hits and recompute after preemption all follow from that. Plans are made one ahead: a
sequence is planned on while its last token is still in flight, and an ending that comes late costs one discarded token.
"""

from collections.abc import Iterable
from enum import Enum

from services.scheduler.core.budget import Costs, StepBudget
from services.scheduler.core.lookahead import MOST_STEPS_BETWEEN, Lookahead
from services.scheduler.core.plan import DraftedRow, PendingStep, StepPlan
from services.scheduler.core.sequence import Sequence, SequenceStatus
from services.scheduler.core.state import DecoderState

_WATERMARK = 0.01  # share of blocks that admission leaves to running sequences


class PreemptionMode(Enum):
    """What becomes of computed tokens whose blocks are taken."""

    AUTO = "auto"  # whichever is expected to cost less
    RECOMPUTE = "recompute"  # computed again
    SWAP = "swap"  # saved in host memory, as long as it has free blocks


class Planner:
    """Makes the plans of one decoder. `costs` are updated by the caller, who measures."""

    def __init__(
        self, state: DecoderState, preemption_mode: PreemptionMode, step_target: float
    ) -> None:
        """`step_target`: microseconds that a step may take while sequences decode; 0 is any."""
        self._state = state
        self._capacity = state.capacity
        self.costs = Costs()
        most = state.capacity.max_drafts
        self.lookahead = Lookahead(most) if most else None
        self.prompt_budget = 0  # tokens that prompts could have in the last step with rows
        self._preemption_mode = preemption_mode
        self._step_target = step_target
        self._watermark = int(_WATERMARK * state.capacity.num_blocks)

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do now."""
        state = self._state
        if state.in_flight and state.isolation.is_active():
            return None
        step = state.begin_step()
        for _ in state.isolation.turns(state.policy):
            prompt_budget = self._fill(step)
            if step.plan.row_slot:
                self.prompt_budget = prompt_budget
                break
        if step.plan.is_empty:
            return None
        step.put_lookahead()
        state.send(step)
        return step.plan

    def _fill(self, step: PendingStep) -> int:
        """Gives rows to the sequences whose turn it is. Returns how many tokens prompts could have had."""
        state = self._state
        preemptions = state.preemptions
        budget = StepBudget(step.plan, self._capacity, self.costs, self._step_target)
        prompt_budget = self._schedule_running(step, budget)
        if preemptions == state.preemptions:  # else there are no blocks for waiting sequences
            lacks_blocks = self._admit(step, budget)
            while lacks_blocks and not step.plan.row_slot and not state.in_flight:
                # Beams may hold all blocks between them while they wait for one that has none.
                beams = [s for s in state.running if s.beams is not None]
                if self._preempt_last(step.plan, beams) is None:
                    break
                lacks_blocks = self._admit(step, budget)
        return prompt_budget

    # Running sequences

    def _schedule_running(self, step: PendingStep, budget: StepBudget) -> int:
        """Sequences that decode come first: their rows cost little and delay tokens that clients wait for. What the
        budget then gives to prompts goes to one after the other. Returns how many tokens that was at the most.
        """
        state, plan = self._state, step.plan
        running, preemptions = state.running, state.preemptions
        selected = state.isolation.select(running)
        # Those that need a block come first, while it can still be taken from a sequence without a row in this plan.
        others = [s for s in selected if s.num_computed_tokens >= s.plain_until]
        plain = [s for s in selected if s.num_computed_tokens < s.plain_until]
        if self.lookahead is not None and others:
            self._choose_drafts(self.lookahead, others, plain)
        for sequence in others:
            if sequence.num_tokens - sequence.num_computed_tokens == 1:
                self._schedule(step, sequence, budget)
        if preemptions != state.preemptions:
            plain = [s for s in plain if s in running]
        _schedule_plain(plan, plain[: budget.whole])
        # Beams whose answer is in flight decode as well, only not in this step, and so do sequences that have no turn.
        decoding = plan.row_slot or len(selected) < len(running)
        if decoding or any(s.beams is not None and s.in_flight for s in others):
            budget.limit_prompts()
        prompt_budget = budget.at(0)
        for sequence in others:
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                self._schedule(step, sequence, budget)
        return prompt_budget

    def _choose_drafts(
        self, lookahead: Lookahead, others: list[Sequence], plain: list[Sequence]
    ) -> None:
        """For those that decode; the plain ones beside them have none."""
        decoding = [s for s in others if s.num_tokens - s.num_computed_tokens == 1]
        able = [
            s
            for s in decoding
            if s.num_tokens > s.prompt_len
            and s.beams is None
            and not s.pooled_width
            and not s.is_certainly_last
        ]
        if able:
            reads_logits = any(s.reads_logits for s in (*decoding, *plain))
            lookahead.choose(able, len(decoding) + len(plain), reads_logits=reads_logits)

    def _schedule(self, step: PendingStep, sequence: Sequence, budget: StepBudget) -> None:
        """Gives a running sequence the tokens that it may compute in this plan."""
        if sequence.status is not SequenceStatus.RUNNING or sequence.is_certainly_last:
            return
        if sequence.beams is not None and sequence.in_flight:
            return  # its next token depends on the answer
        state, plan = self._state, step.plan
        start, slack = sequence.num_computed_tokens, sequence.slack
        count = self._chunk(sequence, start, budget)
        most = min(count + slack, sequence.length_limit - start)
        if count <= 0 or not self._allocate(plan, sequence, start, most):
            return
        row = plan.add_row(sequence, start, count)
        sequence.num_computed_tokens = start + count
        state.tables.register(sequence, step)
        state.media.computed(sequence, sequence.num_computed_tokens)
        if sequence.num_computed_tokens < sequence.num_tokens:
            step.chunks.append((sequence, sequence.generation, start + count))
        elif sequence.forks:
            self._sample_choices(plan, row, sequence)
        elif sequence.pooled_width:
            _pool(plan, row, sequence)
        else:
            if self.lookahead is not None and (slack or sequence.num_drafts):
                self._draft(step, row, sequence, budget)
            _sample(plan, row, sequence)
            if sequence.beams is None:
                allocated = len(sequence.blocks) * self._capacity.block_size
                sequence.plain_until = min(allocated, sequence.length_limit - 1)
                if self.lookahead is not None:
                    self._look_again(self.lookahead, sequence)

    def _draft(self, step: PendingStep, row: int, sequence: Sequence, budget: StepBudget) -> None:
        """Lets a row start as late as it may, and have drafts: as many as were chosen and find room without taking it
        from others."""
        state, plan = self._state, step.plan
        if sequence.slack:
            step.slack[row] = sequence.slack
        most = min(sequence.num_drafts, budget.whole)
        most = min(most, sequence.length_limit - sequence.num_tokens - 1)
        end = plan.row_start[row] + plan.row_count[row] + sequence.slack
        ahead = most
        if 2 * state.blocks.num_free > state.blocks.num_total:
            # Until it is asked for again, at the latest: so it needs no blocks between.
            ahead = max(most, min(MOST_STEPS_BETWEEN, sequence.length_limit - end))
        missing = self._capacity.blocks_for(end + ahead) - len(sequence.blocks)
        if 0 < missing <= state.blocks.num_free - self._watermark:
            state.tables.grow(plan, sequence, missing)
        most = min(most, len(sequence.blocks) * self._capacity.block_size - end)
        if most > 0:
            sample = len(plan.sample_row)
            step.drafted.append(DraftedRow(row, sample, sequence, sequence.generation, most))
            sequence.slack += most
            plan.num_tokens += most
            plan.num_pairs += most * end

    def _look_again(self, lookahead: Lookahead, sequence: Sequence) -> None:
        """When drafts are chosen anew: for the next row, where there are some, else after some tokens."""
        later = 0 if sequence.slack else lookahead.looks_after(sequence)
        sequence.plain_until = min(sequence.plain_until, sequence.num_computed_tokens + later)
        sequence.num_drafts = 0

    def _chunk(self, sequence: Sequence, start: int, budget: StepBudget) -> int:
        """How many tokens from `start` on a sequence may compute. What is computed whole may exceed the budget."""
        most = min(self._known(sequence, start), budget.at(start))
        if most <= 0:
            return 0
        count = self._capacity.parts.chunk(sequence, start, most)
        return count if count <= max(most, budget.raised) else 0

    def _known(self, sequence: Sequence, start: int) -> int:
        """How many tokens from `start` on can be computed with the embeddings that are there."""
        known = self._state.media.plannable(sequence, start)
        return known if known >= self._capacity.parts.at(sequence, start) else 0

    def _sample_choices(self, plan: StepPlan, row: int, sequence: Sequence) -> None:
        """The prompt is computed once for all choices: each samples from the same row and shares the blocks."""
        _sample(plan, row, sequence)
        for child in sequence.forks:
            if not child.ended:
                self._state.fork_choice(plan, child, sequence)
                _sample(plan, row, child)
        sequence.forks = []

    def _allocate(self, plan: StepPlan, sequence: Sequence, start: int, count: int) -> bool:
        """Blocks of its own to write tokens from `start` on, others preempted if it must be. False if that did not
        help. A partly filled block that forks share is copied for each that writes to it, but for the last.
        """
        state = self._state
        if state.tables.is_shared(sequence, start):
            if not self._free_blocks(plan, sequence, 1):
                return False
            if state.tables.is_shared(sequence, start):  # else the others have just been preempted
                state.tables.copy_block(plan, sequence, start)
        missing = self._capacity.blocks_for(start + count) - len(sequence.blocks)
        if missing > 0:
            if not self._free_blocks(plan, sequence, missing):
                return False
            state.tables.grow(plan, sequence, missing)
        return True

    # Preemption

    def _free_blocks(self, plan: StepPlan, sequence: Sequence, count: int) -> bool:
        """Preempts until so many blocks are free. False if the sequence was itself the last, or none is left."""
        while self._state.blocks.num_free < count:
            victim = self._preempt_last(plan, self._state.running)
            if victim is None or victim is sequence:
                return False
        return True

    def _preempt_last(self, plan: StepPlan, among: Iterable[Sequence]) -> Sequence | None:
        """Preempts the last by rank of those without a row in the plan: what is planned must keep its blocks."""
        planned = set(plan.row_sequence).union(plan.sample_sequence)
        candidates = [s for s in among if s not in planned]
        if not candidates:
            return None
        victim = max(candidates, key=self._state.policy)
        self._state.preempt(plan, victim, swap=self._should_swap(victim))
        return victim

    def _should_swap(self, sequence: Sequence) -> bool:
        blocks = self._capacity.blocks_for(sequence.num_computed_tokens)
        mode = self._preemption_mode
        if mode is PreemptionMode.RECOMPUTE or self._capacity.has_state:
            return False
        if not 0 < blocks <= self._state.swapping.host.num_free:
            return False
        there_and_back = 2 * blocks * self.costs.of_block
        recompute = sequence.num_computed_tokens * self.costs.of_token
        return mode is PreemptionMode.SWAP or there_and_back <= recompute

    # Admission

    def _admit(self, step: PendingStep, budget: StepBudget) -> bool:
        """Starts waiting sequences by rank and gives each its first row, while budget, slots and blocks last. Those
        that wait for embeddings or an adapter are passed over. Returns whether one was kept out for want of blocks.
        """
        state = self._state
        admitted, lacks_blocks, held_up = 0, False, self._must_leave_room()
        for sequence in state.isolation.select(state.waiting):
            if budget.at(0) <= 0:
                break
            # From the first that lacks slots on only those start that hold theirs: it may wait for just these.
            fits = state.slots.has_for(sequence)
            held_up = held_up or not fits
            if held_up and not (fits and state.slots.holds(sequence)):
                continue
            if sequence.in_flight:
                continue  # preempted with a token in flight: its id is part of what must be computed again
            cached = state.tables.find_cached(sequence)
            start = len(cached) * self._capacity.block_size
            if sequence.host_blocks:
                start = sequence.num_computed_tokens
            if not self._may_start(sequence, start):
                continue
            if self._chunk(sequence, start, budget) <= 0:
                break
            if not self._has_blocks(sequence, cached):
                lacks_blocks = True
                break
            state.start(step, sequence, cached, start)
            self._schedule(step, sequence, budget)
            admitted += 1
        if admitted:
            state.waiting = [s for s in state.waiting if s.status is SequenceStatus.WAITING]
        return lacks_blocks

    def _must_leave_room(self) -> bool:
        """Whether an isolated sequence lacks only slots or blocks: no other starts before it."""
        isolation, first = self._state.isolation, self._state.isolation.first
        return (
            first is not None
            and isolation.is_turn_of_others
            and first.status is SequenceStatus.WAITING
            and self._state.is_ready(first)
        )

    def _may_start(self, sequence: Sequence, start: int) -> bool:
        """Whether its adapter is there, and the embeddings that it needs first. Sequences that will wait for embeddings
        halfway leave half of the slots and blocks to others, however long that takes.
        """
        state = self._state
        known = self._known(sequence, start)
        if known <= 0 or not state.adapters.may_start(sequence):
            return False
        if start + known == sequence.num_tokens or state.slots.holds(sequence):
            return True
        many_slots = 2 * len(state.slots.free) > self._capacity.max_slots
        return many_slots and 2 * state.blocks.num_free > state.blocks.num_total

    def _has_blocks(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether blocks are free for all known tokens, not only for the first chunk: a sequence that runs out halfway
        would be preempted, come back for the same chunks, and so on while others wait.
        """
        blocks = self._state.blocks
        needed = self._capacity.blocks_for(sequence.num_tokens) - len(cached)
        # Cached blocks that nobody holds count as free until they are held.
        revived = sum(1 for block in cached if blocks.refs(block) == 0)
        spare = blocks.num_free - revived - needed
        return spare >= (self._watermark if self._state.running else 0)


def _schedule_plain(plan: StepPlan, plain: list[Sequence]) -> None:
    """The steady state of decoding: one token each, in blocks that are there."""
    plan.add_generating(plain, [s.num_computed_tokens for s in plain])
    for sequence in plain:
        sequence.num_computed_tokens += 1
        sequence.num_tokens += 1


def _sample(plan: StepPlan, row: int, sequence: Sequence) -> None:
    plan.add_sample(row, sequence)
    sequence.num_tokens += 1


def _pool(plan: StepPlan, row: int, sequence: Sequence) -> None:
    """The vector takes the place of the one token that a sequence may generate, so it is not planned again."""
    plan.add_pool(row, sequence)
    sequence.num_tokens += 1
