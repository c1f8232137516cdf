"""Carries out what a beam search decides: beams are forks, copies and drops of sequences."""

from services.scheduler.core.beam_search import BeamSearch, Continuation
from services.scheduler.core.plan import StepPlan, StepProgress
from services.scheduler.core.sequence import Sequence, SequenceStatus
from services.scheduler.core.state import State


class Beams:
    """Advances searches whose beams have all been answered."""

    def __init__(self, state: State) -> None:
        self._state = state

    def advance(self, progress: StepProgress, search: BeamSearch) -> None:
        """Takes one step of a search, or ends it."""
        continuations = search.advance()
        if search.done:
            progress.beams.append(search)
            self.end(search)
            return
        heirs: dict[
            Sequence, Continuation
        ] = {}  # the first continuation of a beam goes on in its place
        forks: list[Continuation] = []
        for continuation in continuations:
            if heirs.setdefault(continuation.parent, continuation) is not continuation:
                forks.append(continuation)
        for beam in search.live:
            if beam not in heirs:
                self._state.end(beam)
        pairs = list(heirs.items())
        # Children are made of the parent as it was computed, before it takes its own token.
        pairs += [(self._fork(search, c.parent), c) for c in forks]
        for beam, continuation in pairs:
            self._append(beam, continuation.step.token)
        search.assign(sorted(pairs, key=lambda pair: -pair[1].score))

    def put_into(self, plan: StepPlan) -> None:
        """Tells the decoder what was decided since the last plan."""
        state = self._state
        for child, parent in state.forks:
            if child.ended:
                continue
            if parent.slot < 0:  # meanwhile taken off its slot: the child has nothing to be made of
                state.introduce_again(child)
                continue
            plan.fork(child, parent)
        for beam, token in state.tokens:
            if beam.slot >= 0:
                plan.set_token_slot.append(beam.slot)
                plan.set_token.append(token)
        state.forks, state.tokens = [], []

    def end(self, search: BeamSearch) -> None:
        """Forgets all beams and gives their slots back."""
        search.done = True
        for beam in search.live:
            if not beam.ended:
                self._state.end(beam)
        self._state.free_slots += search.spare_slots
        search.spare_slots.clear()

    def _fork(self, search: BeamSearch, parent: Sequence) -> Sequence:
        state = self._state
        child = parent.fork(parent.choice)
        state.know(child)
        child.slot = search.spare_slots.pop()
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_media_passed = parent.num_media_passed
        child.num_registered, child.num_sealed = parent.num_registered, parent.num_sealed
        child.blocks = list(parent.blocks)
        state.blocks.hold(child.blocks)
        child.host_blocks = list(parent.host_blocks)
        state.host.hold(child.host_blocks)
        state.forks.append((child, parent))
        if parent.status is SequenceStatus.RUNNING:
            state.run(child)
        else:
            state.media.restarted(child)
            state.wait(child)
        return child

    def _append(self, beam: Sequence, token: int) -> None:
        beam.tokens.append(token)
        beam.num_tokens = len(beam.tokens)
        self._state.tokens.append((beam, token))
        self._state.settle(beam)
