"""Continuous batching for one decoder.

There is no prefill and no decode: each step gives a sequence some of `num_tokens - num_computed_tokens`, and chunked
prefill, prefix hits and recompute after preemption all follow from that. Plans are made one ahead: a sequence is
planned on while its last token is still in flight, and an ending that comes late costs one discarded token.

    state        sequences, blocks, slots and places in line, shared by the rooms below
    rows         which running sequences compute how many tokens
    step_budget  how many of them may be of prompts
    costs        what tokens and steps are seen to take
    admission    who is let in
    turns        who runs alone, and who does meanwhile
    preemption   who gives up its blocks, and how it gets them back
    results      what an answer changes
    beams        carries out what a `beam_search` decides
"""

from collections.abc import KeysView
from typing import Any

from services.scheduler.core.admission import Admission
from services.scheduler.core.beams import Beams
from services.scheduler.core.blocks import BlockManager, HostBlocks
from services.scheduler.core.budget import Capacity, Costs, StepBudget
from services.scheduler.core.media import MediaState
from services.scheduler.core.plan import StepOutput, StepPlan, StepProgress
from services.scheduler.core.preemption import Preemption, PreemptionMode
from services.scheduler.core.results import Results
from services.scheduler.core.rows import Rows
from services.scheduler.core.sequence import (
    Ending,
    EndReason,
    Error,
    Policy,
    Sequence,
    SequenceStatus,
    first_come_first_served,
)
from services.scheduler.core.state import State


class Scheduler:
    """Sequences, blocks and slots of one decoder under one lease. Pure: called by the servicer with what happened."""

    def __init__(
        self,
        capacity: Capacity,
        encoder_budget: int | None = None,
        policy: Policy = first_come_first_served,
        preemption_mode: PreemptionMode = PreemptionMode.AUTO,
        step_target: float = 0.0,
    ) -> None:
        """`step_target`: microseconds that a step may take while somebody reads along; 0 is any."""
        self.capacity = capacity
        self.steps = 0
        self.prompt_budget = 0  # tokens that prompts could have in the last step with rows
        self.costs = Costs()  # kept up to date by whoever can measure
        self._step_target = step_target
        self._state = State(capacity, policy, encoder_budget or 4 * capacity.max_batched_tokens)
        self._preemption = Preemption(self._state, preemption_mode, self.costs)
        self._rows = Rows(self._state, self._preemption)
        self._admission = Admission(self._state, self._rows)
        self._beams = Beams(self._state)
        self._results = Results(self._state, self._beams)

    # Events

    def add(self, sequence: Sequence, *siblings: Sequence) -> Ending | None:
        """Takes a sequence in. Returns an ending at once if it can never run here.

        Siblings are other choices with the same prompt and no output yet: they share its computation and are forked
        when it is done. A sequence with `beams` becomes the first beam of that search.
        """
        refusal = self.capacity.refusal(sequence, 1 + len(siblings))
        if refusal is not None:
            for one in (sequence, *siblings):
                one.status = SequenceStatus.ENDED
            return Ending(EndReason.ERROR, error=refusal)
        if sequence.num_output_tokens and sequence.is_certainly_last:
            sequence.status = SequenceStatus.ENDED
            return Ending(EndReason.LENGTH)
        if sequence.beams is not None:
            sequence.beams.live = [sequence]
        sequence.forks = list(siblings)
        self._state.enter(sequence)
        return None

    def cancel(self, request_id: str) -> list[Sequence]:
        """Ends all choices of a request that nobody wants any more. Returns those that had not ended already."""
        sequences = self.choices(request_id)
        for sequence in sequences:
            if sequence.beams is not None:
                self._beams.end(sequence.beams)
            elif not sequence.ended:
                self._state.end(sequence)
        return sequences

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

    def embeddings_failed(self, digest: bytes, error: Error) -> StepProgress:
        """The item cannot be encoded: those who need it end."""
        progress = StepProgress()
        for sequence in self.media.users(digest):
            self._results.end_with_error(progress, sequence, error)
        return progress

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do now."""
        state = self._state
        if state.in_flight and (state.turns.are_taken() or not state.turns.is_of_others):
            return None
        plan = StepPlan(self.steps + 1)
        self._take_over(plan)
        for _ in state.turns.order(state.policy):
            for_prompts = self._fill(plan)
            if plan.row_slot:
                self.prompt_budget = for_prompts
                break
        if plan.is_empty:
            return None
        plan.sealed_blocks, state.sealed_blocks = state.sealed_blocks, []
        plan.sealed_hashes, state.sealed_hashes = state.sealed_hashes, []
        self.steps += 1
        state.in_flight.append(plan)
        return plan

    def _fill(self, plan: StepPlan) -> int:
        """Gives rows to those whose turn it is. Returns how many tokens prompts could have had."""
        state = self._state
        preemptions = state.preemptions
        budget = StepBudget(plan, self.capacity, self.costs, self._step_target)
        for_prompts = self._rows.add(plan, budget)
        if preemptions == state.preemptions:  # else there is no room to let anyone in
            crowded = self._admission.add(plan, budget)
            while crowded and not plan.row_slot and not state.in_flight:
                if not self._preemption.take_beam(plan):
                    break
                crowded = self._admission.add(plan, budget)
        return for_prompts

    def _take_over(self, plan: StepPlan) -> None:
        """What has piled up since the last plan and does not depend on room."""
        state = self._state
        # A slot counts as free in the plan that drops it: drops are applied before new sequences and forks.
        state.free_slots.extend(state.drops)
        plan.drop = state.drops + state.drops_of_beams
        state.drops, state.drops_of_beams = [], []
        state.host.release(state.host_releases)
        state.host_releases = []
        self._beams.put_into(plan)
        plan.fetch = state.media.take_fetches()
        plan.release = state.media.take_releases()

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
    def swaps(self) -> int:
        """How many of those went to host memory."""
        return self._state.swaps

    @property
    def host(self) -> HostBlocks:
        """Host memory for what is swapped out."""
        return self._state.host

    @property
    def num_host_releases(self) -> int:
        """Holds on host blocks that end with the next plan: what is in them may still be moving."""
        return len(self._state.host_releases)

    @property
    def num_free_slots(self) -> int:
        """Slots that a new sequence could have."""
        return len(self._state.free_slots)

    @property
    def num_in_flight(self) -> int:
        """Plans that were made and not yet completed."""
        return len(self._state.in_flight)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return self._state.num_sequences

    @property
    def num_ready_to_start(self) -> int:
        """Waiting sequences that lack nothing but room: those that wait for embeddings keep nobody out."""
        return sum(1 for s in self.waiting if self.media.plannable(s, 0) == s.num_tokens)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute of sequences that lack nothing but room or time, prefixes that may be cached included."""
        waiting = sum(
            s.num_tokens for s in self.waiting if self.media.plannable(s, 0) == s.num_tokens
        )
        begun = (s.num_tokens - s.num_computed_tokens for s in self.running)
        return waiting + sum(n for n in begun if n > 1)

    def find(self, request_id: str, choice: int = 0) -> Sequence | None:
        """A sequence that has not ended."""
        for sequence in self._state.requests.get(request_id, ()):
            if sequence.choice == choice:
                return sequence
        return None

    def choices(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that have not ended."""
        return list(self._state.requests.get(request_id, ()))

    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        return [s for choices in self._state.requests.values() for s in choices]
