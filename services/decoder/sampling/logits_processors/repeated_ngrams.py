"""Which token would repeat a run of tokens that a sequence has already (`no_repeat_ngram_size` of transformers)."""

import numpy as np

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class RepeatedNgrams:
    """The tokens of one sequence, its prompt included."""

    def __init__(self, size: int, prompt: Ids, output: Ids) -> None:
        """`size`: of a run, at least 1 token."""
        self._size = size
        self._tokens = np.concatenate([prompt, output]).astype(np.int32)
        self._length = len(self._tokens)

    def fork(self) -> "RepeatedNgrams":
        """The same with an output of its own."""
        child = object.__new__(RepeatedNgrams)
        child._size, child._length = self._size, self._length
        child._tokens = self._tokens[: self._length].copy()
        return child

    def commit(self, token: int) -> None:
        """Takes a sampled token."""
        if self._length == len(self._tokens):
            more = np.zeros(max(64, self._length), np.int32)
            self._tokens = np.concatenate([self._tokens, more])
        self._tokens[self._length] = token
        self._length += 1

    def forbidden(self) -> Ids:
        """The ids that stood behind the last `size` - 1 tokens before."""
        tokens, before = self._tokens[: self._length], self._size - 1
        starts = self._length - before
        if starts <= 0:
            return tokens[:0].astype(np.int64)
        matches = np.ones(starts, bool)
        for place in range(before):
            matches &= tokens[place : place + starts] == tokens[starts + place]
        followers = np.flatnonzero(matches) + before
        found: Ids = tokens[followers[followers < self._length]].astype(np.int64)
        return found
