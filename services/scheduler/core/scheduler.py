"""Continuous batching for one decoder: events in, plans out. What a plan has in it is decided by the `Planner`."""

from typing import Any

from services.scheduler.core.beams import BeamSearch, Continuation
from services.scheduler.core.budget import Capacity, Costs
from services.scheduler.core.lookahead import Lookahead
from services.scheduler.core.plan import PendingStep, StepOutput, StepPlan, StepProgress
from services.scheduler.core.planner import Planner, PreemptionMode
from services.scheduler.core.sequence import (
    Ending,
    EndReason,
    Error,
    Policy,
    Sequence,
    SequenceStatus,
    first_come_first_served,
)
from services.scheduler.core.state import DecoderState

# The decoder's reason for a row whose embeddings it does not have.
MEDIA_NOT_READY = "MEDIA_NOT_READY"
_MAX_LOSSES = 3  # of one media item, before its users end


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
        self._planner = Planner(self.state, preemption_mode, step_target)

    @property
    def costs(self) -> Costs:
        """What steps cost; updated by the caller, who measures."""
        return self._planner.costs

    @property
    def lookahead(self) -> Lookahead | None:
        """How many drafts rows have; None where the decoder puts none into them."""
        return self._planner.lookahead

    def learn(self, plan: StepPlan, output: StepOutput, took: float) -> None:
        """A plan with rows took so many microseconds; to be called before `complete`."""
        drafted = sum(output.drafted)
        unused = sum(plan.row_drafts) - drafted
        if unused:
            plan.num_pairs -= plan.num_pairs * unused // plan.num_tokens
            plan.num_tokens -= unused
        self.costs.learn(plan.num_tokens, plan.num_pairs, took)
        if self.lookahead is not None:
            accepted = sum(map(len, output.more.values()))
            self.lookahead.measure(plan, drafted, accepted, took)

    @property
    def prompt_budget(self) -> int:
        """Tokens that prompts could have in the last step with rows."""
        return self._planner.prompt_budget

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

    def adapter_loaded(self, lora_id: str) -> None:
        """The decoder has an adapter: its sequences may start."""
        self.state.adapters.loaded(lora_id)

    def adapter_failed(self, lora_id: str, error: Error) -> StepProgress:
        """The decoder could not read an adapter: the sequences that wait for it end."""
        progress = StepProgress()
        if self.state.adapters.failed(lora_id):
            for sequence in self.state.sequences():
                if sequence.lora_id == lora_id:
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
        if step.drafted:
            self._take_in_drafts(step, output)
        self._end_pooled(progress, step)
        for search in self._commit(progress, step, output):
            if not search.done and search.is_answered:
                self._advance_search(progress, search)
        for sequence, generation, end in step.chunks:
            if sequence.generation == generation and sequence.status is SequenceStatus.RUNNING:
                state.tables.seal(sequence, end)
        return progress

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do now."""
        return self._planner.plan()

    # Answers

    def _commit(
        self, progress: StepProgress, step: PendingStep, output: StepOutput
    ) -> dict[BeamSearch[Sequence], None]:
        """Appends tokens to their sequences. Returns the searches that were answered."""
        searches: dict[BeamSearch[Sequence], None] = {}
        if output.places:
            self._commit_several(progress, step, output, searches)
            return searches
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

    def _take_in_drafts(self, step: PendingStep, output: StepOutput) -> None:
        """Sequences whose drafts were right have come further than their rows were planned to."""
        for one, drafted in zip(step.drafted, output.drafted, strict=True):
            sequence = one.sequence
            if sequence in step.restarted or sequence.ended:
                continue
            more = len(output.more.get(one.sample, ()))
            sequence.slack -= one.most
            sequence.num_tokens += more
            # One that has lost its blocks meanwhile goes on from where those were.
            if sequence.generation == one.generation:
                sequence.num_computed_tokens += more
            if self.lookahead is not None:
                self.lookahead.learn(sequence, drafted, more)

    def _commit_several(
        self,
        progress: StepProgress,
        step: PendingStep,
        output: StepOutput,
        searches: dict[BeamSearch[Sequence], None],
    ) -> None:
        """As `_commit`, where samples may have several tokens: what comes after an ending is dropped."""
        for sample in _wanted(step, output, searches):
            sequence, place = step.plan.sample_sequence[sample], output.places[sample]
            for token in (output.tokens[sample], *output.more.get(sample, ())):
                sequence.tokens.append(token)
                progress.add(sequence, token, None, place)
                place += 1
                if len(sequence.tokens) >= sequence.watch_from or token in sequence.stop_token_ids:
                    self._settle(progress, len(progress) - 1, sequence, token)
                    if sequence.ended:
                        break

    def _settle(self, progress: StepProgress, index: int, sequence: Sequence, token: int) -> None:
        """After a commit that may have filled a block or ended the sequence."""
        ending = sequence.ending_after(token)
        self.state.update_cache(sequence)
        if ending is not None:
            progress.endings[index] = ending
            self.state.end(sequence)

    def _end_pooled(self, progress: StepProgress, step: PendingStep) -> None:
        """The sequences whose prompt has become a vector have nothing more to do."""
        for pool, sequence in enumerate(step.plan.pool_sequence):
            if not sequence.ended and sequence not in step.restarted:
                self.state.update_cache(sequence)
                progress.add_pooled(sequence, pool)
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
