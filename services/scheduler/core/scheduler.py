"""Continuous batching for one decoder: events in, plans out.

Prefill and decode are not told apart: each step gives a sequence some of `num_tokens - num_computed_tokens`, and
chunked prefill, prefix cache hits and recompute after preemption all follow from that. Plans are made one ahead: a
sequence is planned on while its last token is still in flight, and an ending that comes late costs one discarded token.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any

from services.scheduler.core.beams import BeamSearch, Continuation
from services.scheduler.core.budget import Capacity, Costs, StepBudget
from services.scheduler.core.plan import StepOutput, StepPlan, StepProgress
from services.scheduler.core.sequence import (
    Ending,
    EndReason,
    Error,
    Policy,
    Sequence,
    SequenceStatus,
    first_come_first_served,
)
from services.scheduler.core.state import DecoderState, PendingStep

# The decoder's reason for a row whose embeddings it does not have.
MEDIA_NOT_READY = "MEDIA_NOT_READY"
_MAX_LOSSES = 3  # of one media item, before its users end
_WATERMARK = 0.01  # share of blocks that admission leaves to running sequences


class PreemptionMode(Enum):
    """What becomes of computed tokens whose blocks are taken."""

    AUTO = "auto"  # whichever is expected to cost less
    RECOMPUTE = "recompute"  # computed again
    SWAP = "swap"  # saved in host memory, as long as it has free blocks


class Scheduler:
    """Decides what one decoder computes, under one lease. Pure: no I/O, no clock; told what happened by its callers."""

    def __init__(
        self,
        capacity: Capacity,
        encoder_budget: int | None = None,
        policy: Policy = first_come_first_served,
        preemption_mode: PreemptionMode = PreemptionMode.AUTO,
        step_target: float = 0.0,
    ) -> None:
        """`step_target`: microseconds that a step may take while sequences decode; 0 is any."""
        self.capacity = capacity
        self.state = DecoderState(
            capacity, policy, encoder_budget or 4 * capacity.max_batched_tokens
        )
        self.costs = Costs()  # updated by the caller, who measures
        self.prompt_budget = 0  # tokens that prompts could have in the last step with rows
        self._preemption_mode = preemption_mode
        self._step_target = step_target
        self._watermark = int(_WATERMARK * capacity.num_blocks)

    # Events

    def add(self, sequence: Sequence, *siblings: Sequence) -> Ending | None:
        """Queues a sequence. Returns an ending at once if it can never run here.

        Siblings are other choices with the same prompt and no output yet: they share its computation and are forked
        when it is done. A sequence with `beams` becomes the first beam of that search.
        """
        refusal = self.capacity.refusal(sequence, 1 + len(siblings))
        if refusal is not None:
            for one in (sequence, *siblings):
                one.refuse()
            return Ending(EndReason.ERROR, error=refusal)
        if sequence.num_output_tokens and sequence.is_certainly_last:
            sequence.refuse()
            return Ending(EndReason.LENGTH)
        if sequence.beams is not None:
            sequence.beams.live = [sequence]
        sequence.forks = list(siblings)
        self.state.add(sequence)
        return None

    def cancel(self, request_id: str) -> list[Sequence]:
        """Ends all choices of a request. Returns those that had not ended already."""
        sequences = self.state.choices(request_id)
        for sequence in sequences:
            if sequence.beams is not None:
                self.state.end_search(sequence.beams)
            elif not sequence.ended:
                self.state.end(sequence)
        return sequences

    def embeddings_encoded(self, digest: bytes, artifact: Any) -> None:
        """The encoder has an item's embeddings: the next plan tells the decoder to fetch them."""
        self.state.media.encoded(digest, artifact)

    def embeddings_ready(self, digest: bytes) -> None:
        """The decoder has an item's embeddings: its span may be planned."""
        self.state.media.ready(digest)

    def embeddings_lost(self, digest: bytes) -> StepProgress:
        """The decoder could not fetch them: they are encoded again, or their users end after too many losses."""
        progress = StepProgress()
        self._lose_embeddings(progress, digest)
        return progress

    def embeddings_failed(self, digest: bytes, error: Error) -> StepProgress:
        """The item cannot be encoded: the sequences that need it end."""
        progress = StepProgress()
        for sequence in self.state.media.users(digest):
            self._end_with_error(progress, sequence, error)
        return progress

    def complete(self, output: StepOutput) -> StepProgress:
        """Takes the answer to the oldest plan in flight. Returns what each sequence gained."""
        state = self.state
        step = state.in_flight[0]
        progress = StepProgress()
        for row in output.failed:
            self._fail(progress, step, output, row)
        state.in_flight.popleft()
        for search in self._commit(progress, step, output):
            if not search.done and search.is_answered:
                self._advance_search(progress, search)
        for sequence, generation, end in step.chunks:
            if sequence.generation == generation and sequence.status is SequenceStatus.RUNNING:
                state.seal(sequence, end)
        return progress

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do now."""
        state = self.state
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
        state.send(step)
        return step.plan

    def _fill(self, step: PendingStep) -> int:
        """Gives rows to the sequences whose turn it is. Returns how many tokens prompts could have had."""
        state = self.state
        preemptions = state.preemptions
        budget = StepBudget(step.plan, self.capacity, self.costs, self._step_target)
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
        state, plan = self.state, step.plan
        running, preemptions = state.running, state.preemptions
        selected = state.isolation.select(running)
        # Those that need a block come first, while it can still be taken from a sequence without a row in this plan.
        others = [s for s in selected if s.num_computed_tokens >= s.plain_until]
        plain = [s for s in selected if s.num_computed_tokens < s.plain_until]
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

    def _schedule(self, step: PendingStep, sequence: Sequence, budget: StepBudget) -> None:
        """Gives a running sequence the tokens that it may compute in this plan."""
        if sequence.status is not SequenceStatus.RUNNING or sequence.is_certainly_last:
            return
        if sequence.beams is not None and sequence.in_flight:
            return  # its next token depends on the answer
        state, plan = self.state, step.plan
        start = sequence.num_computed_tokens
        count = self._chunk(sequence, start, budget)
        if count <= 0 or not self._allocate(plan, sequence, start, count):
            return
        row = plan.add_row(sequence, start, count)
        sequence.num_computed_tokens = start + count
        state.register(sequence, step)
        state.media.computed(sequence, sequence.num_computed_tokens)
        if sequence.num_computed_tokens < sequence.num_tokens:
            step.chunks.append((sequence, sequence.generation, start + count))
        elif sequence.forks:
            self._sample_choices(plan, row, sequence)
        else:
            _sample(plan, row, sequence)
            if sequence.beams is None:
                allocated = len(sequence.blocks) * self.capacity.block_size
                sequence.plain_until = min(allocated, sequence.length_limit - 1)

    def _chunk(self, sequence: Sequence, start: int, budget: StepBudget) -> int:
        """How many tokens from `start` on a sequence may compute. What is computed whole may exceed the budget."""
        most = min(self._known(sequence, start), budget.at(start))
        if most <= 0:
            return 0
        count = self.capacity.parts.chunk(sequence, start, most)
        return count if count <= max(most, budget.raised) else 0

    def _known(self, sequence: Sequence, start: int) -> int:
        """How many tokens from `start` on can be computed with the embeddings that are there."""
        known = self.state.media.plannable(sequence, start)
        return known if known >= self.capacity.parts.at(sequence, start) else 0

    def _sample_choices(self, plan: StepPlan, row: int, sequence: Sequence) -> None:
        """The prompt is computed once for all choices: each samples from the same row and shares the blocks."""
        _sample(plan, row, sequence)
        for child in sequence.forks:
            if not child.ended:
                self.state.fork_choice(plan, child, sequence)
                _sample(plan, row, child)
        sequence.forks = []

    def _allocate(self, plan: StepPlan, sequence: Sequence, start: int, count: int) -> bool:
        """Blocks of its own to write tokens from `start` on, others preempted if it must be. False if that did not
        help. A partly filled block that forks share is copied for each that writes to it, but for the last.
        """
        state = self.state
        if state.is_shared(sequence, start):
            if not self._free_blocks(plan, sequence, 1):
                return False
            if state.is_shared(sequence, start):  # else the others have just been preempted
                state.copy_block(plan, sequence, start)
        missing = self.capacity.blocks_for(start + count) - len(sequence.blocks)
        if missing > 0:
            if not self._free_blocks(plan, sequence, missing):
                return False
            state.grow(plan, sequence, missing)
        return True

    # Preemption

    def _free_blocks(self, plan: StepPlan, sequence: Sequence, count: int) -> bool:
        """Preempts until so many blocks are free. False if the sequence was itself the last, or none is left."""
        while self.state.blocks.num_free < count:
            victim = self._preempt_last(plan, self.state.running)
            if victim is None or victim is sequence:
                return False
        return True

    def _preempt_last(self, plan: StepPlan, among: Iterable[Sequence]) -> Sequence | None:
        """Preempts the last by rank of those without a row in the plan: what is planned must keep its blocks."""
        planned = set(plan.row_sequence).union(plan.sample_sequence)
        candidates = [s for s in among if s not in planned]
        if not candidates:
            return None
        victim = max(candidates, key=self.state.policy)
        self.state.preempt(plan, victim, swap=self._should_swap(victim))
        return victim

    def _should_swap(self, sequence: Sequence) -> bool:
        blocks = self.capacity.blocks_for(sequence.num_computed_tokens)
        mode = self._preemption_mode
        if mode is PreemptionMode.RECOMPUTE or self.capacity.has_state:
            return False
        if not 0 < blocks <= self.state.host.num_free:
            return False
        there_and_back = 2 * blocks * self.costs.of_block
        recompute = sequence.num_computed_tokens * self.costs.of_token
        return mode is PreemptionMode.SWAP or there_and_back <= recompute

    # Admission

    def _admit(self, step: PendingStep, budget: StepBudget) -> bool:
        """Starts waiting sequences by rank and gives each its first row, while budget, slots and blocks last. Those
        that wait for embeddings are passed over. Returns whether one was kept out for want of blocks.
        """
        state = self.state
        admitted, lacks_blocks, held_up = 0, False, self._must_leave_room()
        for sequence in state.isolation.select(state.waiting):
            if budget.at(0) <= 0:
                break
            # From the first that lacks slots on only those start that hold theirs: it may wait for just these.
            fits = state.has_slots(sequence)
            held_up = held_up or not fits
            if held_up and not (fits and state.holds_slots(sequence)):
                continue
            if sequence.in_flight:
                continue  # preempted with a token in flight: its id is part of what must be computed again
            cached = state.find_cached(sequence)
            start = len(cached) * self.capacity.block_size
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
        isolation, first = self.state.isolation, self.state.isolation.first
        return (
            first is not None
            and isolation.is_turn_of_others
            and first.status is SequenceStatus.WAITING
            and self.state.media.plannable(first, 0) == first.num_tokens
        )

    def _may_start(self, sequence: Sequence, start: int) -> bool:
        """Whether the embeddings that it needs first are there. Sequences that will wait for embeddings halfway leave
        half of the slots and blocks to others, however long that takes.
        """
        state = self.state
        known = self._known(sequence, start)
        if known <= 0:
            return False
        if start + known == sequence.num_tokens or state.holds_slots(sequence):
            return True
        many_slots = 2 * len(state.free_slots) > self.capacity.max_slots
        return many_slots and 2 * state.blocks.num_free > state.blocks.num_total

    def _has_blocks(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether blocks are free for all known tokens, not only for the first chunk: a sequence that runs out halfway
        would be preempted, come back for the same chunks, and so on while others wait.
        """
        blocks = self.state.blocks
        needed = self.capacity.blocks_for(sequence.num_tokens) - len(cached)
        # Cached blocks that nobody holds count as free until they are held.
        revived = sum(1 for block in cached if blocks.refs(block) == 0)
        spare = blocks.num_free - revived - needed
        return spare >= (self._watermark if self.state.running else 0)

    # Answers

    def _commit(
        self, progress: StepProgress, step: PendingStep, output: StepOutput
    ) -> dict[BeamSearch[Sequence], None]:
        """Appends tokens to their sequences. Returns the searches that were answered."""
        searches: dict[BeamSearch[Sequence], None] = {}
        sequences, tokens = step.plan.sample_sequence, output.tokens
        samples = list(range(len(tokens)))
        if step.restarted or [s for s in sequences if s.is_special]:
            samples = _wanted(step, output, searches)
            sequences = [sequences[i] for i in samples]
            tokens = [tokens[i] for i in samples]
        progress.sequences += sequences
        progress.starts += [len(s.tokens) - s.prompt_len for s in sequences]
        progress.tokens += tokens
        progress.samples += samples
        first = len(progress) - len(sequences)
        for index, (sequence, token) in enumerate(zip(sequences, tokens, strict=True), first):
            history = sequence.tokens
            history.append(token)
            if len(history) >= sequence.watch_from or token in sequence.stop_token_ids:
                self._settle(progress, index, sequence, token)
        return searches

    def _settle(self, progress: StepProgress, index: int, sequence: Sequence, token: int) -> None:
        """After a commit that may have filled a block or ended the sequence."""
        ending = sequence.ending_after(token)
        self.state.update_cache(sequence)
        if ending is not None:
            progress.endings[index] = ending
            self.state.end(sequence)

    def _advance_search(self, progress: StepProgress, search: BeamSearch[Sequence]) -> None:
        """Takes one step of a search all of whose beams are answered, or ends it."""
        continuations = search.advance()
        if search.done:
            progress.beams.append(search)
            self.state.end_search(search)
            return
        # The first continuation of a beam goes on in its place; the others are forks of it.
        in_place: dict[Sequence, Continuation[Sequence]] = {}
        forked: list[Continuation[Sequence]] = []
        for continuation in continuations:
            if in_place.setdefault(continuation.parent, continuation) is not continuation:
                forked.append(continuation)
        for beam in search.live:
            if beam not in in_place:
                self.state.end(beam)
        pairs = list(in_place.items())
        # Forks are made of the parent as it was computed, before it takes its own token.
        pairs += [(self.state.fork_beam(search, c.parent), c) for c in forked]
        for beam, continuation in pairs:
            self.state.append_to_beam(beam, continuation.step.token)
        search.assign(sorted(pairs, key=lambda pair: -pair[1].score))

    # Failures

    def _fail(
        self, progress: StepProgress, step: PendingStep, output: StepOutput, row: int
    ) -> None:
        """Ends the sequences that depend on a failed row, or restarts them where only embeddings were missing."""
        plan, error = step.plan, output.failed[row]
        start, count = plan.row_start[row], plan.row_count[row]
        samples = [i for i, of in enumerate(plan.sample_row) if of == row]
        without = [plan.sample_sequence[i] for i in samples if output.tokens[i] < 0]
        owners = without if samples else [plan.row_sequence[row]]
        failed = [s for s in owners if not s.ended and s not in step.restarted]
        # Otherwise it was computed, and only a choice could not be sampled.
        if len(without) == len(samples):
            self.state.restart_dependents(step, row, failed)
        lost: dict[bytes, None] = {}
        for sequence in failed:
            if error.reason != MEDIA_NOT_READY:
                self._end_with_error(progress, sequence, error)
                continue
            self.state.restart(sequence)
            spans = (s for s in sequence.media if s.end > start and s.offset < start + count)
            lost.update((span.digest, None) for span in spans)
        for digest in lost:
            self._lose_embeddings(progress, digest)

    def _lose_embeddings(self, progress: StepProgress, digest: bytes) -> None:
        media = self.state.media
        if media.lost(digest) < _MAX_LOSSES:
            return
        what = (
            f"the embeddings of a media item were lost {_MAX_LOSSES} times; send the request again"
        )
        for sequence in media.users(digest):
            self._end_with_error(progress, sequence, Error("MEDIA_LOST", what))

    def _end_with_error(self, progress: StepProgress, sequence: Sequence, error: Error) -> None:
        """Ends a sequence without a further token, and its pending forks or the other beams of its search."""
        if sequence.ended:
            return
        ending = Ending(EndReason.ERROR, error=error)
        forks = [s for s in sequence.forks if not s.ended]
        for one in (sequence, *forks):
            progress.add(one, None, ending)
        if sequence.beams is not None:
            self.state.end_search(sequence.beams)
            return
        for one in (sequence, *forks):
            self.state.end(one)


def _schedule_plain(plan: StepPlan, plain: list[Sequence]) -> None:
    """The steady state of decoding: one token each, in blocks that are there."""
    plan.add_generating(plain, [s.num_computed_tokens for s in plain])
    for sequence in plain:
        sequence.num_computed_tokens += 1
        sequence.num_tokens += 1


def _sample(plan: StepPlan, row: int, sequence: Sequence) -> None:
    plan.add_sample(row, sequence)
    sequence.num_tokens += 1


def _wanted(
    step: PendingStep, output: StepOutput, searches: dict[BeamSearch[Sequence], None]
) -> list[int]:
    """The samples whose sequences commit their token; beam searches get their answers on the way."""
    wanted = []
    for sample, sequence in enumerate(step.plan.sample_sequence):
        if sequence.ended or sequence in step.restarted:
            continue
        if sequence.beams is None:
            wanted.append(sample)
        else:
            sequence.beams.answer(sequence, output.top[sample])
            searches[sequence.beams] = None
    return wanted
