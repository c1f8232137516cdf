"""The hook for grammars: whoever knows which tokens may come next writes them as rows of bits.

A matcher lives beside the sampler because the mask of a token depends on the one before it, which
nobody else has seen yet. It is replayed over the output where a sequence is introduced, and goes on
where a token is committed. Masks never leave this process.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from shared.errors import ServingError

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Bits = np.ndarray[tuple[int, int], np.dtype[np.uint32]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

_WORD = 32
_FORBIDDEN = np.float32(-np.inf)


class TokenMatcher(Protocol):
    """Knows for each slot which tokens its grammar allows next."""

    def prepare(self, grammar: str) -> object:
        """What `introduce` takes of a grammar: whatever takes long. Called on any thread. Raises InvalidRequest for a
        grammar that it cannot read.
        """

    def introduce(self, slot: int, prepared: Any, output: Sequence[int]) -> None:
        """Takes what `prepare` gave, and the output so far. Raises InvalidRequest if the output does not follow the
        grammar.
        """

    def fork(self, child: int, parent: int) -> None:
        """Copies a slot's state. A negative child is no slot: it holds a copy that goes ahead of the slot."""

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
        self._slots: set[int] = set()  # the late ones too
        # Those whose grammar the matcher does not have yet, with their output until then.
        self._late: dict[int, tuple[Future[object], list[int]]] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def prepare(self, grammar: str) -> Callable[[], object]:
        """Work for another thread, whose result `introduce` takes."""
        return lambda: self._matcher.prepare(grammar)

    def introduce(
        self, slot: int, grammar: str, output: Ids, prepared: "Future[object] | None" = None
    ) -> None:
        """A sequence follows a grammar. What is being prepared of it is waited for where the first mask is needed, and
        what is wrong with it found there. Raises InvalidRequest as the matcher does where nothing is prepared."""
        if prepared is None:
            self._matcher.introduce(slot, self._matcher.prepare(grammar), output.tolist())
        else:
            self._late[slot] = (prepared, output.tolist())
        self._slots.add(slot)

    def late(self, slots: Ids) -> "list[Future[object]]":
        """What the masks of some slots wait for."""
        return [self._late[slot][0] for slot in slots.tolist() if slot in self._late]

    def settle(self, slots: Ids) -> dict[int, ServingError]:
        """The matcher takes the grammars that were late; of those that are wrong, why, by the place in `slots`."""
        wrong: dict[int, ServingError] = {}
        if not self._late:
            return wrong
        for place, slot in enumerate(slots.tolist()):
            if slot in self._late:
                prepared, output = self._late[slot]
                try:
                    self._matcher.introduce(slot, prepared.result(), output)
                except ServingError as error:  # again at its next sample, until it is dropped
                    wrong[place] = error
                else:
                    del self._late[slot]
        return wrong

    def fork(self, child: int, parent: int) -> None:
        """The child follows the parent's grammar from where that is."""
        if parent in self._late:
            prepared, output = self._late[parent]
            self._late[child] = (prepared, list(output))
        else:
            self._matcher.fork(child, parent)
        self._slots.add(child)

    def drop(self, slot: int) -> None:
        """Forgets a sequence; one without a grammar too."""
        if slot in self._slots:
            self._slots.remove(slot)
            if self._late.pop(slot, None) is None:
                self._matcher.drop(slot)

    def commit(self, slot: int, token: int) -> None:
        """Takes a sampled token."""
        if slot in self._late:
            self._late[slot][1].append(token)
        elif slot in self._slots:
            self._matcher.commit(slot, token)

    def allows(self, slot: int, token: int) -> bool:
        """Whether a sequence's grammar, if it has one, lets a token come next."""
        if slot not in self._slots:
            return True
        word = int(self._filled([slot])[0, token // _WORD])
        return bool(word >> token % _WORD & 1)

    def apply(self, logits: Floats, slots: Sequence[int]) -> None:
        """Forbids, in place, what the grammars of `slots` (one for each row) do not allow."""
        rows = [
            row for row, slot in enumerate(slots) if slot in self._slots and slot not in self._late
        ]
        if not rows:
            return
        bits = self._filled([slots[row] for row in rows])
        octets = bits.astype("<u4", copy=False).view(np.uint8)
        for row, packed in zip(rows, octets, strict=True):
            allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
            logits[row][allowed == 0] = _FORBIDDEN

    def _filled(self, slots: Sequence[int]) -> Bits:
        bits = np.full((len(slots), -(-self._vocab_size // _WORD)), 0xFFFFFFFF, np.uint32)
        self._matcher.fill(bits, slots)
        return bits
