"""Who is let in: waiting sequences, by rank, while budget, slots and blocks last."""

from services.scheduler.core.budget import StepBudget
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.rows import Rows
from services.scheduler.core.sequence import Sequence, SequenceStatus
from services.scheduler.core.state import State

_WATERMARK = 0.01  # share of blocks that admission leaves to running sequences


class Admission:
    """Starts waiting sequences. Those that wait for embeddings keep nobody out."""

    def __init__(self, state: State, rows: Rows) -> None:
        self._state = state
        self._rows = rows
        self._watermark = int(_WATERMARK * state.capacity.num_blocks)

    def add(self, plan: StepPlan, budget: StepBudget) -> bool:
        """Lets sequences in and gives each its first row. Returns whether somebody was kept out for want of blocks."""
        state = self._state
        admitted, crowded, held_up = 0, False, self._must_leave_room()
        for sequence in state.turns.among(state.waiting):
            if budget.at(0) <= 0:
                break
            # From the first that lacks slots on only those come in who hold theirs: it may be these that it waits for.
            fits = state.has_slots(sequence)
            held_up = held_up or not fits
            if held_up and not (fits and state.holds_slots(sequence)):
                continue
            if sequence.in_flight:
                continue  # preempted with a token under way: its id is part of what must be computed again
            cached = self._find_cached(sequence)
            start = self._start_of(sequence, cached)
            known = state.media.plannable(sequence, start)
            if known <= 0 or not (
                start + known == sequence.num_tokens or self._may_pause(sequence)
            ):
                continue
            if self._rows.chunk(sequence, start, budget) <= 0:
                break
            if not self._fits(sequence, cached):
                crowded = True
                break
            self._start(plan, sequence, cached, start)
            self._rows.schedule(plan, sequence, budget)
            admitted += 1
        if admitted:
            state.waiting = [s for s in state.waiting if s.status is SequenceStatus.WAITING]
        return crowded

    def _must_leave_room(self) -> bool:
        """Whether one that is to run alone lacks nothing but room: nobody else comes in before it."""
        turns, first = self._state.turns, self._state.turns.first
        return (
            first is not None
            and turns.is_of_others
            and first.status is SequenceStatus.WAITING
            and self._state.media.plannable(first, 0) == first.num_tokens
        )

    def _may_pause(self, sequence: Sequence) -> bool:
        """Whether one that will wait for embeddings halfway may begin: those that hold slots and blocks meanwhile leave
        half of them to others, however long the embeddings take."""
        state = self._state
        if self._state.holds_slots(sequence):
            return True
        many_slots = 2 * len(state.free_slots) > state.capacity.max_slots
        return many_slots and 2 * state.blocks.num_free > state.blocks.num_total

    def _find_cached(self, sequence: Sequence) -> list[int]:
        size = self._state.capacity.block_size
        if sequence.host_blocks:
            usable = sequence.num_computed_tokens // size
        elif sequence.scores_prompt:
            usable = 0
        else:
            # At least one token must be computed, or there would be no logits to sample from.
            usable = (sequence.num_tokens - 1) // size
        return self._state.blocks.find(sequence.block_hashes[:usable])

    def _start_of(self, sequence: Sequence, cached: list[int]) -> int:
        if sequence.host_blocks:
            return sequence.num_computed_tokens
        return len(cached) * self._state.capacity.block_size

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether all known tokens have room, not only the first chunk: who runs out halfway would give everything up,
        come back for the same chunks, and so on while others wait for something."""
        blocks = self._state.blocks
        needed = self._state.capacity.blocks_for(sequence.num_tokens) - len(cached)
        # Blocks that are found but held by nobody count as free until they are held.
        revived = sum(1 for block in cached if blocks.refs(block) == 0)
        spare = blocks.num_free - revived - needed
        return spare >= (self._watermark if self._state.running else 0)

    def _start(self, plan: StepPlan, sequence: Sequence, cached: list[int], start: int) -> None:
        state = self._state
        state.blocks.hold(cached)
        if sequence.slot < 0:
            state.take_slots(sequence)
            plan.new.append((sequence.slot, sequence))
            sequence.num_cached_tokens = min(start, sequence.prompt_len)
            state.blocks.queries += sequence.num_tokens // state.capacity.block_size
            state.blocks.hits += len(cached)
        sequence.blocks = list(cached)
        if cached:
            plan.origins.append((sequence, cached, False))
        if sequence.host_blocks:
            self._swap_in(plan, sequence)
        sequence.num_computed_tokens = start
        sequence.num_registered = sequence.num_sealed = len(cached)
        plan.edit(sequence.slot, 0, sequence.blocks)
        state.run(sequence)
        state.media.computed(sequence, start)

    def _swap_in(self, plan: StepPlan, sequence: Sequence) -> None:
        """Moves back what is not found on the device."""
        state = self._state
        away = sequence.host_blocks[len(sequence.blocks) :]
        fresh = state.blocks.allocate(len(away))
        plan.swap_in_host += away
        plan.swap_in_device += fresh
        sequence.blocks += fresh
        # A plan swaps out before it swaps in: only the next one may overwrite these.
        state.host_releases += sequence.host_blocks
        sequence.host_blocks = []
