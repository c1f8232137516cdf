"""Continuous batching for one decoder.

There is no prefill and no decode: each step gives a sequence some of `num_tokens - num_computed_tokens`, and chunked
prefill, prefix hits and recompute after preemption all follow from that. Plans are made one ahead: a sequence is
planned on while its last token is still in flight, and an ending that comes late costs one discarded token.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from services.scheduler.core.block_hash import extend_hashes
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.media import MediaState
from services.scheduler.core.plan import Progress, Row, Sample, StepOutput, StepPlan
from services.scheduler.core.policy import first_come_first_served
from services.scheduler.core.sequence import Ending, EndReason, Sequence, SequenceStatus

_WATERMARK = 0.01  # share of blocks that admission leaves to running sequences
MEDIA_NOT_READY = "MEDIA_NOT_READY"  # the decoder's word for a row whose artifact it does not have
_MAX_LOSSES = 3  # of one media item, before its users end


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the decoder said it is."""

    num_blocks: int
    block_size: int
    max_slots: int
    max_model_len: int
    max_batched_tokens: int

    @property
    def max_tokens_of_one(self) -> int:
        """The longest sequence that can ever run here."""
        return min(self.max_model_len, (self.num_blocks - 1) * self.block_size)


class Scheduler:
    """Sequences, blocks and slots of one decoder under one lease. Pure: called by the servicer with what happened."""

    def __init__(self, capacity: Capacity, encoder_budget: int | None = None) -> None:
        self.capacity = capacity
        self.blocks = BlockManager(capacity.num_blocks, capacity.block_size)
        self.media = MediaState(encoder_budget or 4 * capacity.max_batched_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.steps = 0
        self.preemptions = 0
        self._by_id: dict[tuple[str, int], Sequence] = {}
        self._free_slots = list(range(capacity.max_slots - 1, -1, -1))
        self._in_flight: deque[StepPlan] = deque()
        self._drops: list[int] = []
        self._sealed: list[tuple[int, bytes]] = []
        self._watermark = int(_WATERMARK * capacity.num_blocks)

    # Events

    def add(self, sequence: Sequence) -> Ending | None:
        """Takes a sequence in. Returns an ending at once if it can never run here."""
        longest = self.capacity.max_tokens_of_one
        if sequence.prompt_len >= longest:
            message = (
                f"the prompt has {sequence.prompt_len} tokens and this decoder holds at most {longest} tokens of "
                "one sequence; shorten the prompt or give the decoder more KV memory"
            )
            sequence.status = SequenceStatus.ENDED
            return Ending(EndReason.ERROR, error=("PROMPT_TOO_LONG", message))
        sequence.max_tokens = min(sequence.max_tokens, longest - sequence.prompt_len)
        self._by_id[sequence.request_id, sequence.choice] = sequence
        extend_hashes(sequence, self.capacity.block_size)
        self.media.add(sequence)
        self._wait(sequence)
        return None

    def cancel(self, request_id: str, choice: int = 0) -> Sequence | None:
        """Ends a sequence that nobody wants any more. Returns it, or None if it has ended already."""
        sequence = self._by_id.get((request_id, choice))
        if sequence is not None:
            self._end(sequence)
        return sequence

    def embeddings_encoded(self, digest: bytes, artifact: Any) -> None:
        """The encoder has an item's embeddings: the next plan tells the decoder to pull them."""
        self.media.encoded(digest, artifact)

    def embeddings_ready(self, digest: bytes) -> None:
        """The decoder has an item's embeddings: its span may be planned."""
        self.media.ready(digest)

    def embeddings_lost(self, digest: bytes) -> list[Progress]:
        """The decoder could not get them: they are encoded again, or their users end after too many losses."""
        if self.media.lost(digest) < _MAX_LOSSES:
            return []
        message = (
            f"the embeddings of a media item were lost {_MAX_LOSSES} times; send the request again"
        )
        return self.embeddings_failed(digest, ("MEDIA_LOST", message))

    def embeddings_failed(self, digest: bytes, error: tuple[str, str]) -> list[Progress]:
        """The item cannot be encoded: those who need it end."""
        return [self._end_with_error(s, error) for s in self.media.users(digest)]

    def find(self, request_id: str, choice: int = 0) -> Sequence | None:
        """A sequence that has not ended."""
        return self._by_id.get((request_id, choice))

    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        return list(self._by_id.values())

    # Planning

    @property
    def num_in_flight(self) -> int:
        """Plans that were made and not yet completed."""
        return len(self._in_flight)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._by_id)

    @property
    def num_ready_to_start(self) -> int:
        """Waiting sequences that lack nothing but room: those that wait for embeddings keep nobody out."""
        return sum(1 for s in self.waiting if self.media.plannable(s, 0) > 0)

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do now."""
        plan = StepPlan(self.steps + 1)
        self._take_over(plan)
        preemptions = self.preemptions
        budget = self.capacity.max_batched_tokens
        # A row for every sequence that is generating comes first: it costs little and somebody is reading along.
        for sequence in list(self.running):
            if sequence.num_tokens - sequence.num_computed_tokens == 1 and budget > 0:
                budget -= self._schedule(plan, sequence, 1)
        for sequence in list(self.running):
            if sequence.num_tokens - sequence.num_computed_tokens > 1 and budget > 0:
                budget -= self._schedule(plan, sequence, budget)
        if preemptions == self.preemptions:  # else there is no room to let anyone in
            self._admit(plan, budget)
        if plan.is_empty:
            return None
        for block, content in self._sealed:
            plan.sealed_blocks.append(block)
            plan.sealed_hashes.append(content)
        self._sealed.clear()
        self.steps += 1
        self._in_flight.append(plan)
        return plan

    def _take_over(self, plan: StepPlan) -> None:
        """What has piled up since the last plan and does not depend on room."""
        plan.drop, self._drops = self._drops, []
        plan.fetch = self.media.take_fetches()
        plan.release = self.media.take_releases()
        # A slot counts as free in the plan that drops it: drops are applied before new sequences.
        self._free_slots.extend(plan.drop)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Lets waiting sequences in while budget, slots and blocks last."""
        skipped: list[Sequence] = []
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            if sequence.slot < 0 and not self._free_slots:
                break
            if sequence.in_flight:
                # Preempted with a token under way: its id is part of what must be computed again.
                skipped.append(self.waiting.popleft())
                continue
            cached = self._find_cached(sequence)
            start = len(cached) * self.capacity.block_size
            count = min(self.media.plannable(sequence, start), budget)
            if count <= 0:
                skipped.append(self.waiting.popleft())
                continue
            needed = self._blocks_for(start + count) - len(cached)
            # Blocks that are found but held by nobody count as free until they are held.
            revived = sum(1 for block in cached if self.blocks.refs(block) == 0)
            spare = self.blocks.num_free - revived - needed
            if spare < (self._watermark if self.running else 0):
                break
            self.waiting.popleft()
            self._start(plan, sequence, cached)
            budget -= self._schedule(plan, sequence, count)
        self.waiting.extendleft(reversed(skipped))

    def _find_cached(self, sequence: Sequence) -> list[int]:
        # At least one token must be computed, or there would be no logits to sample from.
        usable = (sequence.num_tokens - 1) // self.capacity.block_size
        return self.blocks.find(sequence.block_hashes[:usable])

    def _start(self, plan: StepPlan, sequence: Sequence, cached: list[int]) -> None:
        self.blocks.hold(cached)
        hit = len(cached) * self.capacity.block_size
        if sequence.slot < 0:
            sequence.slot = self._free_slots.pop()
            plan.new.append((sequence.slot, sequence))
            sequence.num_cached_tokens = min(hit, sequence.prompt_len)
            self.blocks.queries += sequence.num_tokens // self.capacity.block_size
            self.blocks.hits += len(cached)
        sequence.blocks = list(cached)
        sequence.num_computed_tokens = sequence.num_completed_tokens = hit
        sequence.num_registered = sequence.num_sealed = len(cached)
        plan.edit(sequence.slot, 0, cached)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        self.media.computed(sequence, hit)

    def _schedule(self, plan: StepPlan, sequence: Sequence, limit: int) -> int:
        """Gives a running sequence up to `limit` tokens in this plan. Returns how many it got."""
        if sequence.status is not SequenceStatus.RUNNING or sequence.is_certainly_last:
            return 0
        start = sequence.num_computed_tokens
        count = min(self.media.plannable(sequence, start), limit)
        if count <= 0 or not self._grow(plan, sequence, start + count):
            return 0
        plan.rows.append(Row(sequence.slot, sequence, start, count))
        sequence.num_computed_tokens = start + count
        if sequence.num_computed_tokens == sequence.num_tokens:
            plan.samples.append(Sample(len(plan.rows) - 1, sequence.slot, sequence))
            sequence.in_flight += 1
        self._register(sequence)
        self.media.computed(sequence, sequence.num_computed_tokens)
        return count

    def _grow(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for `num_tokens`, preempting the youngest if it must. False if that did not help."""
        held = len(sequence.blocks)
        missing = self._blocks_for(num_tokens) - held
        if missing <= 0:
            return True
        while self.blocks.num_free < missing:
            victim = self._youngest_outside(plan)
            if victim is None:
                return False
            self._preempt(plan, victim)
            if victim is sequence:
                return False
        fresh = self.blocks.allocate(missing)
        sequence.blocks.extend(fresh)
        plan.edit(sequence.slot, held, fresh)
        return True

    def _youngest_outside(self, plan: StepPlan) -> Sequence | None:
        """The last to have come of those without a row in this plan: what is planned must keep its blocks."""
        planned = {id(row.sequence) for row in plan.rows}
        candidates = [s for s in self.running if id(s) not in planned]
        return max(candidates, key=first_come_first_served) if candidates else None

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        """Takes a sequence's blocks away; it is computed again later. It stays known: history and slot are kept."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._release_blocks(sequence)
        plan.edit(sequence.slot, 0, [])
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        self.media.restarted(sequence)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        """Queues by policy. Arrivals come in order: the place is mostly the end, or the head after preemption."""
        rank = first_come_first_served(sequence)
        index = len(self.waiting)
        while index and first_come_first_served(self.waiting[index - 1]) > rank:
            index -= 1
        self.waiting.insert(index, sequence)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.capacity.block_size)

    def _register(self, sequence: Sequence) -> None:
        """Makes blocks findable whose every token is known and whose last one is computed in a plan already made."""
        full = min(sequence.num_computed_tokens, len(sequence.tokens)) // self.capacity.block_size
        for index in range(sequence.num_registered, full):
            self.blocks.register(sequence.blocks[index], sequence.block_hashes[index])
        sequence.num_registered = max(sequence.num_registered, full)

    # Results

    def complete(self, output: StepOutput) -> list[Progress]:
        """Takes the answer to the oldest plan in flight. Returns what each sequence gained."""
        plan = self._in_flight.popleft()
        progress: list[Progress] = []
        for index, error in output.failed.items():
            progress += self._fail(plan, plan.rows[index], error)
        for row in plan.rows:
            if row.sequence.status is SequenceStatus.RUNNING:
                row.sequence.num_completed_tokens = row.start + row.count
        for position, sample in enumerate(plan.samples):
            sequence = sample.sequence
            if sequence is None:
                continue
            sequence.in_flight -= 1
            if sequence.status is not SequenceStatus.ENDED:
                progress.append(self._commit(sequence, output.tokens[position], position))
        for row in plan.rows:
            if row.sequence.status is SequenceStatus.RUNNING:
                self._register(row.sequence)
                self._seal(row.sequence)
        return progress

    def _commit(self, sequence: Sequence, token: int, position: int) -> Progress:
        start = sequence.num_output_tokens
        ending = sequence.commit(token)
        extend_hashes(sequence, self.capacity.block_size)
        if ending is not None:
            self._end(sequence)
        return Progress(sequence, start, token, ending, position)

    def _seal(self, sequence: Sequence) -> None:
        """Tells the decoder which blocks are worth keeping: full, committed, and the ones that `find` returns."""
        known = min(sequence.num_completed_tokens, len(sequence.tokens))
        for index in range(sequence.num_sealed, known // self.capacity.block_size):
            block = sequence.blocks[index]
            if self.blocks.is_cached(block):
                self._sealed.append((block, sequence.block_hashes[index]))
            sequence.num_sealed = index + 1

    def _fail(self, plan: StepPlan, row: Row, error: tuple[str, str]) -> list[Progress]:
        """Ends a sequence whose row failed, or starts it again where only an artifact was missing."""
        sequence = row.sequence
        if sequence.status is not SequenceStatus.RUNNING:
            return []
        for block in sequence.blocks[row.start // self.capacity.block_size :]:
            self.blocks.forget(block)
            if (
                self.blocks.refs(block) > 1
            ):  # whoever shares what was never computed must compute it
                for sharer in [s for s in self.running if s is not sequence and block in s.blocks]:
                    self._introduce_again(plan, sharer)
        if error[0] != MEDIA_NOT_READY:
            return [self._end_with_error(sequence, error)]
        spans = [
            s for s in sequence.media if s.end > row.start and s.offset < row.start + row.count
        ]
        self._introduce_again(plan, sequence)
        return [p for span in spans for p in self.embeddings_lost(span.digest)]

    def _introduce_again(self, plan: StepPlan, sequence: Sequence) -> None:
        """Takes a sequence off its slot: what the decoder has sampled for it since is not to be trusted."""
        for made in (plan, *self._in_flight):
            made.disown(sequence)
        self.running.remove(sequence)
        self._release_blocks(sequence)
        self._drops.append(sequence.slot)
        sequence.slot = -1
        sequence.in_flight = 0
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        self.media.restarted(sequence)
        self._wait(sequence)

    def _end_with_error(self, sequence: Sequence, error: tuple[str, str]) -> Progress:
        start = sequence.num_output_tokens
        self._end(sequence)
        return Progress(sequence, start, None, Ending(EndReason.ERROR, error=error))

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._release_blocks(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.ENDED
        if sequence.slot >= 0:
            self._drops.append(sequence.slot)
            sequence.slot = -1
        self.media.remove(sequence)
        del self._by_id[sequence.request_id, sequence.choice]

    def _release_blocks(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_registered = sequence.num_sealed = sequence.num_completed_tokens = 0
