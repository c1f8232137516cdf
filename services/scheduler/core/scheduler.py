"""Continuous batching for one decoder.

There is no prefill and no decode: each step gives a sequence some of `num_tokens - num_computed_tokens`, and chunked
prefill, prefix hits and recompute after preemption all follow from that. Plans are made one ahead: a sequence is
planned on while its last token is still in flight, and an ending that comes late costs one discarded token.

    state        sequences, blocks, slots and places in line, shared by the rooms below
    rows         which running sequences compute how many tokens
    admission    who is let in
    preemption   who gives up its blocks
    results      what an answer changes
"""

from collections.abc import KeysView
from typing import Any

from services.scheduler.core.admission import Admission
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.media import MediaState
from services.scheduler.core.plan import StepOutput, StepPlan, StepProgress
from services.scheduler.core.policy import Policy, first_come_first_served
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.results import Results
from services.scheduler.core.rows import Rows
from services.scheduler.core.sequence import Ending, EndReason, Sequence, SequenceStatus
from services.scheduler.core.state import Capacity, State

__all__ = ["Capacity", "Scheduler"]


class Scheduler:
    """Sequences, blocks and slots of one decoder under one lease. Pure: called by the servicer with what happened."""

    def __init__(
        self,
        capacity: Capacity,
        encoder_budget: int | None = None,
        policy: Policy = first_come_first_served,
    ) -> None:
        self.capacity = capacity
        self.steps = 0
        self._state = State(capacity, policy, encoder_budget or 4 * capacity.max_batched_tokens)
        preemption = Preemption(self._state)
        self._rows = Rows(self._state, preemption)
        self._admission = Admission(self._state, self._rows)
        self._results = Results(self._state)

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
        self._state.enter(sequence)
        return None

    def cancel(self, request_id: str, choice: int = 0) -> Sequence | None:
        """Ends a sequence that nobody wants any more. Returns it, or None if it has ended already."""
        sequence = self.find(request_id, choice)
        if sequence is not None:
            self._state.end(sequence)
        return sequence

    def complete(self, output: StepOutput) -> StepProgress:
        """Takes the answer to the oldest plan in flight. Returns what each sequence gained."""
        return self._results.complete(output)

    def embeddings_encoded(self, digest: bytes, artifact: Any) -> None:
        """The encoder has an item's embeddings: the next plan tells the decoder to pull them."""
        self.media.encoded(digest, artifact)

    def embeddings_ready(self, digest: bytes) -> None:
        """The decoder has an item's embeddings: its span may be planned."""
        self.media.ready(digest)

    def embeddings_lost(self, digest: bytes) -> StepProgress:
        """The decoder could not get them: they are encoded again, or their users end after too many losses."""
        progress = StepProgress()
        self._results.lose_embeddings(progress, digest)
        return progress

    def embeddings_failed(self, digest: bytes, error: tuple[str, str]) -> StepProgress:
        """The item cannot be encoded: those who need it end."""
        progress = StepProgress()
        for sequence in self.media.users(digest):
            self._results.end_with_error(progress, sequence, error)
        return progress

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do now."""
        state = self._state
        plan = StepPlan(self.steps + 1)
        self._take_over(plan)
        preemptions = state.preemptions
        budget = self._rows.add(plan, self.capacity.max_batched_tokens)
        if preemptions == state.preemptions:  # else there is no room to let anyone in
            self._admission.add(plan, budget)
        if plan.is_empty:
            return None
        for block, content in state.sealed:
            plan.sealed_blocks.append(block)
            plan.sealed_hashes.append(content)
        state.sealed.clear()
        self.steps += 1
        state.in_flight.append(plan)
        return plan

    def _take_over(self, plan: StepPlan) -> None:
        """What has piled up since the last plan and does not depend on room."""
        state = self._state
        plan.drop, state.drops = state.drops, []
        plan.fetch = state.media.take_fetches()
        plan.release = state.media.take_releases()
        # A slot counts as free in the plan that drops it: drops are applied before new sequences.
        state.free_slots.extend(plan.drop)

    # Questions

    @property
    def blocks(self) -> BlockManager:
        """KV blocks of the decoder."""
        return self._state.blocks

    @property
    def media(self) -> MediaState:
        """Embeddings that sequences need."""
        return self._state.media

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences without blocks, by rank."""
        return self._state.waiting

    @property
    def running(self) -> KeysView[Sequence]:
        """Sequences that hold blocks."""
        return self._state.running.keys()

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its blocks for another."""
        return self._state.preemptions

    @property
    def num_in_flight(self) -> int:
        """Plans that were made and not yet completed."""
        return len(self._state.in_flight)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._state.by_id)

    @property
    def num_ready_to_start(self) -> int:
        """Waiting sequences that lack nothing but room: those that wait for embeddings keep nobody out."""
        return sum(1 for s in self.waiting if self.media.plannable(s, 0) > 0)

    def find(self, request_id: str, choice: int = 0) -> Sequence | None:
        """A sequence that has not ended."""
        return self._state.by_id.get((request_id, choice))

    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        return list(self._state.by_id.values())
