"""What the answer to a plan changes: tokens are committed, sequences end or fail."""

from services.scheduler.core.plan import StepOutput, StepPlan, StepProgress
from services.scheduler.core.sequence import Ending, EndReason, Sequence, SequenceStatus
from services.scheduler.core.state import State

MEDIA_NOT_READY = "MEDIA_NOT_READY"  # the decoder's word for a row whose artifact it does not have
_MAX_LOSSES = 3  # of one media item, before its users end


class Results:
    """Takes answers in the order of the plans."""

    def __init__(self, state: State) -> None:
        self._state = state

    def complete(self, output: StepOutput) -> StepProgress:
        """Takes the answer to the oldest plan in flight. Returns what each sequence gained."""
        state = self._state
        plan = state.in_flight.popleft()
        progress = StepProgress()
        for row, error in output.failed.items():
            self._fail(progress, plan, row, error)
        self._commit(progress, plan, output.tokens)
        for sequence, tenure, end in plan.chunks:
            if sequence.tenure == tenure and sequence.status is SequenceStatus.RUNNING:
                state.seal(sequence, end)
        return progress

    def _commit(self, progress: StepProgress, plan: StepPlan, tokens: list[int]) -> None:
        sequences, starts, samples = progress.sequences, progress.starts, progress.samples
        gained = progress.tokens
        for sample, (sequence, token) in enumerate(zip(plan.sample_sequence, tokens, strict=True)):
            if sequence is None or sequence.ended:
                continue
            history = sequence.tokens
            starts.append(len(history) - sequence.prompt_len)
            history.append(token)
            sequences.append(sequence)
            gained.append(token)
            samples.append(sample)
            if len(history) >= sequence.watch_from or token in sequence.stop_token_ids:
                ending = sequence.ending_after(token)
                self._state.settle(sequence)
                if ending is not None:
                    progress.endings[len(sequences) - 1] = ending
                    self._state.end(sequence)

    def _fail(
        self, progress: StepProgress, plan: StepPlan, row: int, error: tuple[str, str]
    ) -> None:
        """Ends a sequence whose row failed, or starts it again where only an artifact was missing."""
        state = self._state
        sequence, start, count = plan.row_sequence[row], plan.row_start[row], plan.row_count[row]
        if sequence.status is not SequenceStatus.RUNNING:
            return
        for block in sequence.blocks[start // state.capacity.block_size :]:
            state.blocks.forget(block)
            if state.blocks.refs(block) > 1:
                # Whoever shares what was never computed must compute it.
                for sharer in [s for s in state.running if s is not sequence and block in s.blocks]:
                    plan.disown(sharer)
                    state.introduce_again(sharer)
        if error[0] != MEDIA_NOT_READY:
            self.end_with_error(progress, sequence, error)
            return
        plan.disown(sequence)
        state.introduce_again(sequence)
        for span in sequence.media:
            if span.end > start and span.offset < start + count:
                self.lose_embeddings(progress, span.digest)

    def lose_embeddings(self, progress: StepProgress, digest: bytes) -> None:
        """They are encoded again, or their users end after too many losses."""
        if self._state.media.lost(digest) < _MAX_LOSSES:
            return
        message = (
            f"the embeddings of a media item were lost {_MAX_LOSSES} times; send the request again"
        )
        for sequence in self._state.media.users(digest):
            self.end_with_error(progress, sequence, ("MEDIA_LOST", message))

    def end_with_error(
        self, progress: StepProgress, sequence: Sequence, error: tuple[str, str]
    ) -> None:
        """Ends a sequence without a further token."""
        progress.add(sequence, None, Ending(EndReason.ERROR, error=error))
        self._state.end(sequence)
