"""Which drafts stand, once tokens are chosen for all of a row's positions."""

import numpy as np

from services.decoder.sampling.choices import Choices
from services.decoder.worker.plans.drafts import Drafts, Longs
from services.decoder.worker.slots.kept_by_slot import Introduced, KeptBySlot


class Accepting(KeptBySlot):
    """Keeps the tokens that end each sequence: behind one of them nothing is accepted."""

    def __init__(self) -> None:
        self._stops: dict[int, frozenset[int]] = {}

    def introduce(self, slot: int, sequence: Introduced) -> None:
        """See `KeptBySlot.introduce`."""
        self._stops[slot] = frozenset(sequence.message.sampling.stop_token_ids)

    def fork(self, child: int, parent: int, choice: int) -> None:
        """See `KeptBySlot.fork`."""
        self._stops[child] = self._stops.get(parent, frozenset())

    def drop(self, slot: int) -> None:
        """See `KeptBySlot.drop`."""
        self._stops.pop(slot, None)

    def ends(self, slot: int, token: int) -> bool:
        """Whether a token ends the sequence."""
        return token in self._stops[slot]

    def cut(
        self, drafts: Drafts, samples: Longs, owners: Longs, chosen: Choices, *, own: bool = False
    ) -> None:
        """Takes back what was chosen behind a draft that differs from the token chosen in its place, behind a token
        that ends the sequence, and behind a failure. samples: of the plan, ascending, those that `chosen` has; owners:
        the slot of each. own: the drafts are the decoder's, for which nobody asked: a failure behind one is taken back
        too, since without drafts it would be the next step's."""
        closed: set[int] = set()
        for place in np.flatnonzero(drafts.are_behind[samples]).tolist():
            sample, slot = int(samples[place]), int(owners[place])
            token = int(chosen.tokens[place])
            if slot in closed or (own and place in chosen.failed and drafts.order[sample]):
                chosen.discard(place)
                closed.add(slot)
            elif token != drafts.expected[sample] or self.ends(slot, token):
                closed.add(slot)
