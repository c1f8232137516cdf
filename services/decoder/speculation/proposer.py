"""What guesses tokens."""

from abc import ABC, abstractmethod

import numpy as np

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


class Proposer(ABC):
    """Guesses what sequences go on with. Whatever it says, the tokens of an answer are the same: the sampler chooses
    each as it would without, and a guess only says for which ones the model is run at once.

    Called on one thread at a time, between steps, so it must be quick. Of several ranks the first one's is asked alone.
    """

    @abstractmethod
    def begin(self, slot: int, scope: bytes) -> None:
        """A sequence is known from now on, in the place of whatever the slot held. scope: names the sequences whose
        answers may be used for each other's guesses, since a client can tell from an answer's speed what others were
        given; empty: none may."""

    @abstractmethod
    def end(self, slot: int, answer: Ints) -> None:
        """A sequence is over, and has generated these tokens."""

    @abstractmethod
    def propose(self, slot: int, tokens: Ints, most: int) -> list[int]:
        """Up to `most` guesses of what comes after the tokens [length] of a sequence, in their order; none where there
        is no good one. tokens: prompt and output, the same as before and those that have come since."""
