"""The hook for grammars: whoever knows which tokens may come next writes them as rows of bits.

A matcher lives beside the sampler because the mask of a token depends on the one before it, which
nobody else has seen yet. It is replayed over the output where a sequence is introduced, and goes on
where a token is committed. Masks never leave this process.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shared.errors import ServingError
from tessera.common.v1.sampling_pb2 import SamplingParams

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Bits = np.ndarray[tuple[int, int], np.dtype[np.uint32]]
BitRow = np.ndarray[tuple[int], np.dtype[np.uint32]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

WORD = 32
_FORBIDDEN = np.float32(-np.inf)


@dataclass(frozen=True)
class Grammar:
    """What one sequence follows: a grammar's text, the ids that end the sequence, and its output so far."""

    text: str
    stop_ids: Sequence[int] = ()
    output: Sequence[int] = ()

    @classmethod
    def of(cls, params: SamplingParams, output: Ids) -> "Grammar":
        """A sequence's with these settings."""
        return cls(params.grammar, tuple(params.stop_token_ids), output.tolist())


class TokenMatcher(Protocol):
    """Knows for each slot which tokens its grammar allows next. `prepare` is called on any thread, `fill` while nothing
    else is."""

    def prepare(self, grammar: Grammar) -> object:
        """What `introduce` takes: whatever takes long. Raises InvalidRequest for a grammar that cannot be read, and
        ServingError if the output does not follow it.
        """

    def introduce(self, slot: int, prepared: Any) -> None:
        """Takes what `prepare` gave, which others may take too."""

    def fork(self, child: int, parent: int) -> None:
        """Copies a slot's state. A negative child is no slot: it holds a copy that goes ahead of the slot."""

    def drop(self, slot: int) -> None:
        """Forgets a slot."""

    def commit(self, slot: int, token: int) -> None:
        """Goes on by one sampled token."""

    def fill(self, bitmask_rows: Bits, slots: Sequence[int]) -> dict[int, ServingError]:
        """Writes one row for each slot: bit `id % 32` of word `id // 32` is set where the token may
        come next. Rows come filled with ones; bits beyond the vocabulary mean nothing. Returns why there is no mask,
        for rows without one.
        """


@dataclass(frozen=True)
class _Mask:
    """Of a slot's next token; `wrong`: why there is none."""

    bits: BitRow
    wrong: ServingError | None


class TokenMasks:
    """The slots that have a grammar, and their masks on logits. Masks are computed on a thread of their own where that
    is asked for before they are needed."""

    def __init__(self, matcher: TokenMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._slots: set[int] = set()  # the late ones too
        # Those whose grammar the matcher does not have yet.
        self._late: dict[int, Future[object]] = {}
        self._masks: dict[int, _Mask] = {}  # of next tokens
        self._pool = ThreadPoolExecutor(1, "masks")  # its thread starts when it is needed
        self._computing: Future[None] | None = None

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def rows(self, slots: Ids) -> list[int]:
        """The places of those that have a grammar."""
        return [place for place, slot in enumerate(slots.tolist()) if slot in self._slots]

    def prepare(self, grammar: Grammar) -> object:
        """What `introduce` takes; called on any thread. Raises ServingError as the matcher does."""
        return self._matcher.prepare(grammar)

    def introduce(
        self, slot: int, grammar: Grammar, prepared: "Future[object] | None" = None
    ) -> None:
        """A sequence follows a grammar. What is being prepared of it is waited for where the first mask is needed, and
        what is wrong with it found there. Raises ServingError as the matcher does where nothing is prepared."""
        self._join()
        if prepared is None:
            self._matcher.introduce(slot, self._matcher.prepare(grammar))
        else:
            self._late[slot] = prepared
        self._slots.add(slot)

    def begin(self, slots: Ids) -> "list[Future[Any]]":
        """Computes the masks of some slots from now on; what they wait for, grammars that are late among it."""
        self._join()
        found = dict.fromkeys(slot for slot in slots.tolist() if slot in self._slots)
        if not found:
            return []
        self._settle(slot for slot in found if slot in self._late and self._late[slot].done())
        late: list[Future[Any]] = [self._late[slot] for slot in found if slot in self._late]
        wanted = [slot for slot in found if slot not in self._late and slot not in self._masks]
        if wanted:
            self._computing = self._pool.submit(self._compute, wanted)
            late.append(self._computing)
        return late

    def settle(self, slots: Ids) -> dict[int, ServingError]:
        """The masks of some slots, grammars that were late among them; of those that are wrong, why, by the place in
        `slots`."""
        self._join()
        given = slots.tolist()
        wrong = self._settle(slot for slot in dict.fromkeys(given) if slot in self._late)
        here = [slot for slot in dict.fromkeys(given) if slot in self._slots and slot not in wrong]
        self._compute([slot for slot in here if slot not in self._masks])
        for slot in here:
            if (error := self._masks[slot].wrong) is not None:
                wrong[slot] = error
        return {place: wrong[slot] for place, slot in enumerate(given) if slot in wrong}

    def fork(self, child: int, parent: int) -> None:
        """The child follows the parent's grammar from where that is."""
        self._join()
        if parent in self._late:
            self._late[child] = self._late[parent]
        else:
            self._matcher.fork(child, parent)
            if parent in self._masks:
                self._masks[child] = self._masks[parent]
        self._slots.add(child)

    def drop(self, slot: int) -> None:
        """Forgets a sequence; one without a grammar too."""
        if slot in self._slots:
            self._join()
            self._slots.remove(slot)
            self._masks.pop(slot, None)
            if self._late.pop(slot, None) is None:
                self._matcher.drop(slot)

    def commit(self, slot: int, token: int) -> None:
        """Takes a sampled token."""
        if slot in self._slots:
            self._join()
            self._masks.pop(slot, None)
            if slot in self._late:  # its first token was chosen by a copy that went ahead
                self._settle([slot])
            self._matcher.commit(slot, token)

    # Of slots whose masks are settled:

    def allows(self, slot: int, token: int) -> bool:
        """Whether a sequence's grammar, if it has one, lets a token come next."""
        if slot not in self._slots:
            return True
        mask = self._masks[slot]
        return mask.wrong is None and bool(int(mask.bits[token // WORD]) >> token % WORD & 1)

    def allows_only(self, slot: int, tokens: Ids) -> bool:
        """Whether a sequence has a grammar that lets none but some tokens come next."""
        mask = self._masks.get(slot)
        if mask is None or mask.wrong is not None:
            return False
        others = mask.bits.copy()
        np.bitwise_and.at(others, tokens // WORD, ~(1 << (tokens % WORD)).astype(np.uint32))
        return not others.any()

    def apply(self, logits: Row, slot: int) -> None:
        """Forbids, in place, what the grammar of `slot`, if it has one, does not allow; nothing where it is wrong."""
        mask = self._masks.get(slot)
        if mask is not None and mask.wrong is None:
            _forbid(logits, mask.bits)

    def largest(self, logits: Row, slot: int) -> int | None:
        """The token of the largest logit that the grammar of `slot` allows, the first of equals, where the grammar is
        not wrong and no logit need be forbidden to find it: where it allows few, or the largest of all."""
        mask = self._masks.get(slot)
        if mask is None or mask.wrong is not None:
            return None
        if _are_few(mask.bits, len(logits)):
            ids = _ids(mask.bits)
            return int(ids[logits[ids].argmax()]) if len(ids) else None
        token = int(logits.argmax())
        return token if self.allows(slot, token) else None

    def _settle(self, slots: Iterable[int]) -> dict[int, ServingError]:
        """The matcher takes grammars that were late; waits for them."""
        wrong: dict[int, ServingError] = {}
        for slot in list(slots):
            try:
                self._matcher.introduce(slot, self._late[slot].result())
            except ServingError as error:  # again at its next sample, until it is dropped
                wrong[slot] = error
            else:
                del self._late[slot]
        return wrong

    def _join(self) -> None:
        """Until no mask is being computed: the matcher is called by one thread at a time. What has failed is missing
        then, and computed again by whoever needs it."""
        if self._computing is not None:
            wait([self._computing])
            self._computing = None

    def _compute(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        bits = np.full((len(slots), -(-self._vocab_size // WORD)), 0xFFFFFFFF, np.uint32)
        wrong = self._matcher.fill(bits, slots)
        if rest := self._vocab_size % WORD:
            bits[:, -1] &= np.uint32((1 << rest) - 1)
        for row, slot in enumerate(slots):
            self._masks[slot] = _Mask(bits[row], wrong.get(row))


def _are_few(bits: BitRow, count: int) -> bool:
    """Whether less than half of `count` bits are set."""
    return 2 * int(np.bitwise_count(bits).sum()) < count


def _ids(bits: BitRow) -> Ids:
    """The set bits' numbers, ascending. Words without any are not looked at closer: of most masks nearly all."""
    words = np.flatnonzero(bits)
    octets = bits[words].astype("<u4", copy=False).view(np.uint8)
    places = np.flatnonzero(np.unpackbits(octets, bitorder="little").view(np.bool_))
    ids: Ids = words[places // WORD] * WORD + places % WORD
    return ids


def _forbid(logits: Row, allowed: BitRow) -> None:
    """What is not allowed, by whichever of the two is fewer: masks allow or forbid nearly all."""
    if _are_few(allowed, len(logits)):
        ids = _ids(allowed)
        kept = logits[ids]
        logits.fill(_FORBIDDEN)
        logits[ids] = kept
    else:
        ids = _ids(~allowed)
        logits[ids[ids < len(logits)]] = _FORBIDDEN
