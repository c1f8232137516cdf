"""Who is let in: waiting sequences, by rank, while budget, slots and blocks last."""

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

    def add(self, plan: StepPlan, budget: int) -> None:
        """Lets sequences in and gives each its first row."""
        state = self._state
        admitted = 0
        for sequence in state.waiting:
            if budget <= 0 or (sequence.slot < 0 and not state.free_slots):
                break
            if sequence.in_flight:
                continue  # preempted with a token under way: its id is part of what must be computed again
            cached = self._find_cached(sequence)
            start = len(cached) * state.capacity.block_size
            count = min(state.media.plannable(sequence, start), budget)
            if count <= 0:
                continue
            if not self._fits(cached, start + count):
                break
            self._start(plan, sequence, cached)
            budget -= self._rows.schedule(plan, sequence, count)
            admitted += 1
        if admitted:
            state.waiting = [s for s in state.waiting if s.status is SequenceStatus.WAITING]

    def _find_cached(self, sequence: Sequence) -> list[int]:
        # At least one token must be computed, or there would be no logits to sample from.
        usable = (sequence.num_tokens - 1) // self._state.capacity.block_size
        return self._state.blocks.find(sequence.block_hashes[:usable])

    def _fits(self, cached: list[int], num_tokens: int) -> bool:
        blocks = self._state.blocks
        needed = self._state.capacity.blocks_for(num_tokens) - len(cached)
        # Blocks that are found but held by nobody count as free until they are held.
        revived = sum(1 for block in cached if blocks.refs(block) == 0)
        spare = blocks.num_free - revived - needed
        return spare >= (self._watermark if self._state.running else 0)

    def _start(self, plan: StepPlan, sequence: Sequence, cached: list[int]) -> None:
        state = self._state
        size = state.capacity.block_size
        state.blocks.hold(cached)
        hit = len(cached) * size
        if sequence.slot < 0:
            sequence.slot = state.free_slots.pop()
            plan.new.append((sequence.slot, sequence))
            sequence.num_cached_tokens = min(hit, sequence.prompt_len)
            state.blocks.queries += sequence.num_tokens // size
            state.blocks.hits += len(cached)
        sequence.blocks = list(cached)
        sequence.num_computed_tokens = hit
        sequence.num_registered = sequence.num_sealed = len(cached)
        plan.edit(sequence.slot, 0, cached)
        state.run(sequence)
        state.media.computed(sequence, hit)
