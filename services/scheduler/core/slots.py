"""The slots of one decoder: which are free, which sequence has which, and blocks for media that slots hold."""

from services.scheduler.core.beams import BeamSearch
from services.scheduler.core.encoder_blocks import EncoderBlocks
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Sequence


class Slots:
    """Gives slots to sequences and takes them back. One that a decoder knows is free from the plan on that drops it."""

    def __init__(self, count: int, encoder_blocks: EncoderBlocks) -> None:
        self.encoder_blocks = encoder_blocks
        self.free = list(range(count - 1, -1, -1))
        # For the next plan.
        self._drops: list[int] = []
        self._beam_drops: list[int] = []  # they stay with their beam search
        self._dropped: list[Sequence] = []  # those with media whose slots these were

    def has_for(self, sequence: Sequence) -> bool:
        """Whether a sequence and its forks have slots and blocks for their media, or can have them."""
        if not self.encoder_blocks.has_for(sequence):
            return False
        if sequence.beams is not None:
            enough = len(self.free) >= sequence.beams.num_beams
            return enough or self.holds(sequence)
        return len(self.free) >= len(_without_slot(sequence))

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence or one of its forks has a slot since an earlier start."""
        if sequence.beams is not None:
            return sequence.slot >= 0 or bool(sequence.beams.spare_slots)
        return any(s.slot >= 0 for s in (sequence, *sequence.forks))

    def take(self, sequence: Sequence) -> None:
        """Gives slots to a sequence and its forks. A beam search gets all that it will ever need."""
        if sequence.beams is not None:
            spare = sequence.beams.spare_slots
            if not spare:
                spare += [self.free.pop() for _ in range(sequence.beams.num_beams)]
            self.give(sequence, spare.pop())
            return
        for one in _without_slot(sequence):
            self.give(one, self.free.pop())

    def give(self, sequence: Sequence, slot: int) -> None:
        """Gives this slot to a sequence without one."""
        sequence.slot = slot
        self.encoder_blocks.hold(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Takes back the slot of a sequence, if it has one; the next plan tells the decoder."""
        if sequence.slot >= 0:
            if sequence.beams is not None and not sequence.beams.done:
                self._beam_drops.append(sequence.slot)
                sequence.beams.spare_slots.append(sequence.slot)
            else:
                self._drops.append(sequence.slot)
            if sequence.media:
                self._dropped.append(sequence)
            sequence.slot = -1

    def take_back(self, sequence: Sequence) -> None:
        """The same for a slot that the decoder knows nothing of yet."""
        if sequence.slot >= 0:
            self.free.append(sequence.slot)
            self.encoder_blocks.release(sequence)
            sequence.slot = -1

    def end_search(self, search: BeamSearch[Sequence]) -> None:
        """Takes back those that no beam of a search has."""
        self.free += search.spare_slots
        search.spare_slots.clear()

    def put_drops_into(self, plan: StepPlan) -> None:
        """A slot counts as free in the plan that drops it: drops are applied before new sequences and forks."""
        if self._drops or self._beam_drops:
            self.free.extend(self._drops)
            plan.drop = self._drops + self._beam_drops
            self._drops, self._beam_drops = [], []
            for sequence in self._dropped:
                self.encoder_blocks.release(sequence)
            self._dropped = []


def _without_slot(sequence: Sequence) -> list[Sequence]:
    return [s for s in (sequence, *sequence.forks) if s.slot < 0 and not s.ended]
