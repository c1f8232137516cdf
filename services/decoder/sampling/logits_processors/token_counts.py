"""Which tokens a sequence has seen, for penalties: only those, never a row of the vocabulary."""

import numpy as np

Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class TokenCounts:
    """The distinct tokens of prompt and output, and what each costs: repetition (Keskar et al.,
    2019) over both, frequency and presence over the output.
    """

    def __init__(
        self,
        prompt: Ids,
        output: Ids,
        *,
        repetition: float,
        presence: float,
        frequency: float,
    ) -> None:
        """Ids are inside the vocabulary."""
        self._repetition = np.float32(repetition)
        self._presence = np.float32(presence)
        self._frequency = np.float32(frequency)
        seen = np.concatenate([prompt, output]) if repetition != 1 else output
        self._ids: Ids = np.unique(seen)
        self._size = len(self._ids)
        counts = np.zeros(self._size, np.float32)
        np.add.at(counts, np.searchsorted(self._ids, output), 1)
        self._in_output = counts > 0
        self._cost: Row = counts * self._frequency
        self._cost[self._in_output] += self._presence
        self._place = {token: place for place, token in enumerate(self._ids.tolist())}

    def fork(self) -> "TokenCounts":
        """The same for a child: later tokens of one do not count for the other."""
        child = object.__new__(TokenCounts)
        child.__dict__.update(self.__dict__)
        child._ids, child._cost = self._ids.copy(), self._cost.copy()
        child._in_output, child._place = self._in_output.copy(), dict(self._place)
        return child

    def commit(self, token: int) -> None:
        """Counts a sampled token."""
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._size
            self._size += 1
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token
        if not self._in_output[place]:
            self._in_output[place] = True
            self._cost[place] += self._presence
        self._cost[place] += self._frequency

    @property
    def only_lowers(self) -> bool:
        """Whether no token is rewarded for having been seen."""
        return bool(self._repetition >= 1 and self._presence >= 0 and self._frequency >= 0)

    def __contains__(self, token: int) -> bool:
        """Whether `penalize` changes its logit."""
        return token in self._place

    def penalize(self, logits: Row) -> None:
        """Changes the logits of the tokens in question."""
        ids = self._ids[: self._size]
        values = logits[ids]
        if self._repetition != 1:
            lowered = values * self._repetition
            values = np.where(values > 0, values / self._repetition, lowered)
        if self._presence or self._frequency:
            values -= self._cost[: self._size]
        logits[ids] = values

    def _grow(self) -> None:
        more = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
        self._cost = np.concatenate([self._cost, np.zeros(more, np.float32)])
        self._in_output = np.concatenate([self._in_output, np.zeros(more, bool)])
