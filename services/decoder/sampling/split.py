"""Which of a step's samples are chosen where: each by its own settings, whatever the others beside it ask for."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Split:
    """Of every sample of a step, in their order. A slot may have several of them."""

    # Chosen where the logits are: the largest, or drawn. The host chooses the others, from logits.
    on_device: Flags
    # Their logits come to the host: it chooses by them, or reports log-probabilities.
    whole: Flags
    # The largest logit is taken, though the host may have to change some: it is right where it would not be changed.
    # Where it would be, the logits are computed afterwards.
    guessed: Flags
    # All take the largest logit, and nothing else is asked of any.
    is_plain: bool = False

    @classmethod
    @lru_cache(maxsize=1024)
    def largest(cls, count: int) -> "Split":
        """All of `count` samples take the largest logit. One object for all that ask: its arrays cannot be written."""
        every, none = np.ones(count, bool), np.zeros(count, bool)
        every.flags.writeable = none.flags.writeable = False
        return cls(every, none, none, is_plain=True)

    @property
    def needs_logits(self) -> bool:
        """Whether the largest logit of each sample is not enough."""
        return bool(self.whole.any())

    @property
    def whole_rows(self) -> Ids:
        """The samples whose logits come to the host; they come in this order."""
        return np.flatnonzero(self.whole)

    def logits_of(self, samples: Ids) -> Ids:
        """Of samples whose logits come to the host the rows of what arrives."""
        return (np.cumsum(self.whole) - 1)[samples]
