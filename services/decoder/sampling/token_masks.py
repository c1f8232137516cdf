"""The hook for grammars: whoever knows which tokens may come next writes them as rows of bits.

A matcher lives beside the sampler because the mask of a token depends on the one before it, which
nobody else has seen yet. It is replayed over the output where a sequence is introduced, and goes on
where a token is committed. Masks never leave this process.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Bits = np.ndarray[tuple[int, int], np.dtype[np.uint32]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

_WORD = 32
_FORBIDDEN = np.float32(-np.inf)


class TokenMatcher(Protocol):
    """Knows for each slot which tokens its grammar allows next."""

    def introduce(self, slot: int, grammar: str, output: Sequence[int]) -> None:
        """Takes a grammar and the output so far. Raises InvalidRequest for a grammar that it
        cannot read, or that the output does not follow.
        """

    def fork(self, child: int, parent: int) -> None:
        """Copies a slot's state."""

    def drop(self, slot: int) -> None:
        """Forgets a slot."""

    def commit(self, slot: int, token: int) -> None:
        """Goes on by one sampled token."""

    def fill(self, bitmask_rows: Bits, slots: Sequence[int]) -> None:
        """Writes one row for each slot: bit `id % 32` of word `id // 32` is set where the token may
        come next. Rows come filled with ones; bits beyond the vocabulary mean nothing.
        """


class TokenMasks:
    """The slots that have a grammar, and their masks on logits."""

    def __init__(self, matcher: TokenMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._slots: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def introduce(self, slot: int, grammar: str, output: Ids) -> None:
        """A sequence follows a grammar. Raises InvalidRequest as the matcher does."""
        self._matcher.introduce(slot, grammar, output.tolist())
        self._slots.add(slot)

    def fork(self, child: int, parent: int) -> None:
        """The child follows the parent's grammar from where that is."""
        self._matcher.fork(child, parent)
        self._slots.add(child)

    def drop(self, slot: int) -> None:
        """Forgets a sequence; one without a grammar too."""
        if slot in self._slots:
            self._slots.remove(slot)
            self._matcher.drop(slot)

    def commit(self, slot: int, token: int) -> None:
        """Takes a sampled token."""
        if slot in self._slots:
            self._matcher.commit(slot, token)

    def apply(self, logits: Floats, slots: Sequence[int]) -> None:
        """Forbids, in place, what the grammars of `slots` (one for each row) do not allow."""
        rows = [row for row, slot in enumerate(slots) if slot in self._slots]
        if not rows:
            return
        words = -(-self._vocab_size // _WORD)
        bits = np.full((len(rows), words), 0xFFFFFFFF, np.uint32)
        self._matcher.fill(bits, [slots[row] for row in rows])
        octets = bits.astype("<u4", copy=False).view(np.uint8)
        for row, packed in zip(rows, octets, strict=True):
            allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
            logits[row][allowed == 0] = _FORBIDDEN
