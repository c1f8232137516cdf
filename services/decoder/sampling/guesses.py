"""Whether it is worth to take the largest logit for a token that penalties or masks may decide."""

import numpy as np

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

_MOST = 63  # samples that a slot is left out for


class Guesses:
    """By slot how often the largest logit was not the one to take: after each such miss the slot's next samples are
    not guessed, about twice as many as after the miss before, and half as many once a guess was right."""

    def __init__(self, max_slots: int) -> None:
        self._pause = np.zeros(max_slots, np.int32)  # samples to leave out after the next miss
        self._rest = np.zeros(max_slots, np.int32)  # samples to leave out from now on

    def begin(self, slot: int) -> None:
        """Nothing is known of the sequence that has this slot now."""
        self._pause[slot] = self._rest[slot] = 0

    def are_worth(self, slots: Ids) -> bool:
        """Whether to guess one sample of each of these distinct slots; counts the samples that are left out."""
        resting = slots[self._rest[slots] > 0]
        self._rest[resting] -= 1
        return not len(resting)

    def learn(self, slot: int, right: bool) -> None:
        """What became of a guess."""
        if right:
            self._pause[slot] //= 2
        else:
            self._pause[slot] = min(2 * self._pause[slot] + 1, _MOST)
            self._rest[slot] = self._pause[slot]
