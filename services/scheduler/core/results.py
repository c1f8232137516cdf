"""What the answer to a plan changes: tokens are committed, sequences end or fail."""

from services.scheduler.core.beam_search import BeamSearch
from services.scheduler.core.beams import Beams
from services.scheduler.core.plan import StepOutput, StepPlan, StepProgress
from services.scheduler.core.sequence import Ending, EndReason, Error, Sequence, SequenceStatus
from services.scheduler.core.state import State

MEDIA_NOT_READY = "MEDIA_NOT_READY"  # the decoder's word for a row whose artifact it does not have
_MAX_LOSSES = 3  # of one media item, before its users end


class Results:
    """Takes answers in the order of the plans."""

    def __init__(self, state: State, beams: Beams) -> None:
        self._state = state
        self._beams = beams

    def complete(self, output: StepOutput) -> StepProgress:
        """Takes the answer to the oldest plan in flight. Returns what each sequence gained."""
        state = self._state
        plan = state.in_flight.popleft()
        progress = StepProgress()
        for row, error in output.failed.items():
            self._fail(progress, plan, output.tokens, row, error)
        for search in self._commit(progress, plan, output):
            if not search.done and search.is_answered:
                self._beams.advance(progress, search)
        for sequence, tenure, end in plan.chunks:
            if sequence.tenure == tenure and sequence.status is SequenceStatus.RUNNING:
                state.seal(sequence, end)
        return progress

    def _commit(
        self, progress: StepProgress, plan: StepPlan, output: StepOutput
    ) -> dict[BeamSearch, None]:
        """Appends tokens to their sequences. Returns the searches that were answered."""
        searches: dict[BeamSearch, None] = {}
        sequences, tokens = plan.sample_sequence, output.tokens
        samples = list(range(len(tokens)))
        if plan.disowned or [s for s in sequences if s.is_special]:
            samples = self._wanted(plan, output, searches)
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
                self._look(progress, index, sequence, token)
        return searches

    def _wanted(
        self, plan: StepPlan, output: StepOutput, searches: dict[BeamSearch, None]
    ) -> list[int]:
        """The samples whose sequences still want their token; searches get their answers on the way."""
        wanted = []
        for sample, sequence in enumerate(plan.sample_sequence):
            if sequence.ended or sequence in plan.disowned:
                continue
            if sequence.beams is None:
                wanted.append(sample)
            else:
                sequence.beams.answer(sequence, output.top[sample])
                searches[sequence.beams] = None
        return wanted

    def _look(self, progress: StepProgress, index: int, sequence: Sequence, token: int) -> None:
        """After a commit that may have filled a block or ended the sequence."""
        ending = sequence.ending_after(token)
        self._state.settle(sequence)
        if ending is not None:
            progress.endings[index] = ending
            self._state.end(sequence)

    def _fail(
        self,
        progress: StepProgress,
        plan: StepPlan,
        tokens: list[int],
        row: int,
        error: Error,
    ) -> None:
        """Ends the sequences that hang on a failed row, or starts them again where only an artifact was missing."""
        start, count = plan.row_start[row], plan.row_count[row]
        samples = [i for i, of in enumerate(plan.sample_row) if of == row]
        without = [plan.sample_sequence[i] for i in samples if tokens[i] < 0]
        owners = without if samples else [plan.row_sequence[row]]
        failed = [s for s in owners if not s.ended and s not in plan.disowned]
        if len(without) == len(samples):  # else it was computed, and only a choice was not possible
            self._distrust(plan, row, failed)
        lost: dict[bytes, None] = {}
        for sequence in failed:
            if error.reason != MEDIA_NOT_READY:
                self.end_with_error(progress, sequence, error)
                continue
            self._introduce_again(plan, sequence)
            spans = (s for s in sequence.media if s.end > start and s.offset < start + count)
            lost.update((span.digest, None) for span in spans)
        for digest in lost:
            self.lose_embeddings(progress, digest)

    def _distrust(self, plan: StepPlan, row: int, failed: list[Sequence]) -> None:
        """A row was not computed, and so nothing that rests on it is right, in this plan and in those behind it: such
        blocks are not to be found again, and who has begun with them begins anew. Sequences that have ended meanwhile
        are followed too, because they left blocks behind."""
        doubtful = dict.fromkeys([plan.row_sequence[row], *failed])
        wrong: set[int] = set()
        for made in (plan, *self._state.in_flight):
            for sequence, blocks, computed in made.origins:
                if computed and sequence in doubtful:
                    wrong.update(blocks)
                elif not computed and not wrong.isdisjoint(blocks):
                    doubtful[sequence] = None
            # Choices that were forked from a doubtful row share its blocks.
            for of, sequence in zip(made.sample_row, made.sample_sequence, strict=True):
                if made.row_sequence[of] in doubtful:
                    doubtful[sequence] = None
        for block in wrong:
            self._state.blocks.forget(block)
        for sequence in doubtful:
            if not sequence.ended and sequence not in failed and sequence not in plan.disowned:
                self._introduce_again(plan, sequence)

    def _introduce_again(self, plan: StepPlan, sequence: Sequence) -> None:
        plan.disowned.add(sequence)
        self._state.introduce_again(sequence)

    def lose_embeddings(self, progress: StepProgress, digest: bytes) -> None:
        """They are encoded again, or their users end after too many losses."""
        if self._state.media.lost(digest) < _MAX_LOSSES:
            return
        message = (
            f"the embeddings of a media item were lost {_MAX_LOSSES} times; send the request again"
        )
        for sequence in self._state.media.users(digest):
            self.end_with_error(progress, sequence, Error("MEDIA_LOST", message))

    def end_with_error(self, progress: StepProgress, sequence: Sequence, error: Error) -> None:
        """Ends a sequence without a further token, and those that were to be forked from it or search along."""
        if sequence.ended:
            return
        ending = Ending(EndReason.ERROR, error=error)
        forks = [s for s in sequence.forks if not s.ended]
        for one in (sequence, *forks):
            progress.add(one, None, ending)
        if sequence.beams is not None:
            self._beams.end(sequence.beams)
            return
        for one in (sequence, *forks):
            self._state.end(one)
