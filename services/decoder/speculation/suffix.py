"""Guesses by repetition: what came after the same tokens before, in the prompt, the answer, or earlier answers.

The idea is prompt lookup decoding (A. Saxena, 2023), which vLLM has as `ngram`; that the length of a guess follows the
length of what agrees is of SuffixDecoding (Oliaro et al., arXiv 2411.04975).
"""

from collections import OrderedDict, deque
from itertools import chain

import numpy as np

from services.decoder.speculation.proposer import Ints, Proposer

Keys = np.ndarray[tuple[int], np.dtype[np.int64]]

_LONGEST = 16  # tokens that are compared
_CANDIDATES = 64  # places that are looked at, the latest ones
_OWN_LEAST = 2  # tokens that must agree within a sequence,
_OTHER_LEAST = 3  # and with an earlier answer
_ANSWER_TOKENS = 16_384  # kept of earlier answers of a scope
_LEAST_ANSWER = 8  # tokens of an answer that is worth keeping
_SCOPES = 64
# Which share of guesses is right at first, where two tokens agree, three, and so on, the last where more do.
_FIRST_SHARES = (0.45, 0.6, 0.7, 0.8, 0.85, 0.9)
_OWN_RATE, _USUAL_RATE = 0.2, 0.02  # by how much a guess changes those of its sequence, and of all
_LEAST_SHARE = 0.3  # a guess that is less likely to be right is not made
_BETWEEN = -1  # stands between two answers, and is no token


class SuffixProposer(Proposer):
    """Looks for the longest end of a sequence that was there before, the latest one of several. Memory is bounded:
    some 16 bytes for each token of running sequences, and 64 scopes with 16,384 tokens of earlier answers each.

    How likely a guess is to be right is learned by how many tokens agree, for each sequence, from all that was found:
    what is too unlikely to be guessed is compared with what comes as well, and costs no step.
    """

    def __init__(self) -> None:
        self._scopes: dict[int, bytes] = {}
        self._histories: dict[int, _History] = {}  # of slots that were asked about
        self._answers: OrderedDict[bytes, _Answers] = OrderedDict()  # those used last at the end
        self._usual = list(_FIRST_SHARES)  # of all sequences

    def begin(self, slot: int, scope: bytes) -> None:
        """See `Proposer.begin`."""
        self._scopes[slot] = scope
        self._histories.pop(slot, None)

    def end(self, slot: int, answer: Ints) -> None:
        """See `Proposer.end`."""
        scope = self._scopes.pop(slot, b"")
        self._histories.pop(slot, None)
        if not scope or len(answer) < _LEAST_ANSWER:
            return
        self._answers.setdefault(scope, _Answers()).add(answer)
        self._answers.move_to_end(scope)
        if len(self._answers) > _SCOPES:
            self._answers.popitem(last=False)

    def propose(self, slot: int, tokens: Ints, most: int) -> list[int]:
        """See `Proposer.propose`. As many guesses as are likely enough to be right, those before them included."""
        history = self._histories.get(slot)
        if history is None:
            history = self._histories[slot] = _History(list(self._usual))
        history.compare(tokens, self._usual)
        history.pairs.extend(tokens)
        best, length = _longest(tokens[:-1], history.pairs.before_last(), tokens, _OWN_LEAST)
        source = tokens
        answers = self._answers.get(self._scopes.get(slot, b""))
        if answers is not None and length < _LONGEST:
            other, agree = answers.find(tokens)
            if agree > length:
                best, length, source = other, agree, answers.tokens
        if not length:
            return []
        found = _following(source, best + 1, most)
        history.found, history.at, history.agreed = found, len(tokens), length
        return found[: history.likely(length, len(found))]


class _History:
    """What is kept of a sequence that is asked about."""

    def __init__(self, shares: list[float]) -> None:
        self.pairs = _Pairs()
        self._shares = shares  # of guesses that were right, by how many tokens agreed
        # What may come from the place `at` on, where so many tokens agreed.
        self.found: list[int] = []
        self.at = self.agreed = 0

    def compare(self, tokens: Ints, usual: list[float]) -> None:
        """Learns from what has come in the place of what was found last, for the sequence and all."""
        for place, token in enumerate(self.found):
            if self.at + place >= len(tokens):
                break
            is_right = int(tokens[self.at + place]) == token
            kind = _kind(self.agreed + place)
            self._shares[kind] += _OWN_RATE * (is_right - self._shares[kind])
            usual[kind] += _USUAL_RATE * (is_right - usual[kind])
            if not is_right:
                break
        self.found = []

    def likely(self, length: int, most: int) -> int:
        """How many guesses are likely enough, where so many tokens agree before the first one."""
        share = 1.0
        for place in range(most):
            share *= self._shares[_kind(length + place)]
            if share < _LEAST_SHARE:
                return place
        return most


class _Pairs:
    """Each token of a growing sequence with the one before it, as one number."""

    def __init__(self) -> None:
        self._keys: Keys = np.zeros(0, np.int64)
        self._count = 0

    def extend(self, tokens: Ints) -> None:
        """Takes in the tokens that have come."""
        if len(tokens) > len(self._keys):
            grown = np.full(max(256, 2 * len(tokens)), -1, np.int64)
            grown[: self._count] = self._keys[: self._count]
            self._keys = grown
        first = max(1, self._count)
        if first < len(tokens):
            self._keys[first : len(tokens)] = _pairs(tokens[first - 1 :])
        self._count = len(tokens)

    def before_last(self) -> Ints:
        """Where the last pair was before: places of its second token."""
        keys = self._keys[: self._count]
        return np.flatnonzero(keys[:-1] == keys[-1])[-_CANDIDATES:].astype(np.int32)


class _Answers:
    """Earlier answers, the latest ones."""

    def __init__(self) -> None:
        self._kept: deque[Ints] = deque()
        self._size = 0
        self._is_changed = True
        self.tokens: Ints = np.zeros(0, np.int32)  # of all, with something between them
        self._keys: Keys = np.zeros(0, np.int64)  # of each token from the second on

    def add(self, answer: Ints) -> None:
        """Keeps the end of an answer, and forgets the oldest ones for it."""
        self._kept.append(answer[-_ANSWER_TOKENS:].copy())
        self._size += len(self._kept[-1])
        while self._size > _ANSWER_TOKENS:
            self._size -= len(self._kept.popleft())
        self._is_changed = True

    def find(self, tokens: Ints) -> tuple[int, int]:
        """The place in `tokens` of these answers up to which they agree with the end of a sequence, and in how many
        tokens; 0 if in too few."""
        if self._is_changed:
            between = np.array([_BETWEEN], np.int32)
            self.tokens = np.concatenate(
                [*chain.from_iterable((one, between) for one in self._kept)]
            )
            self._keys = _pairs(self.tokens)
            self._is_changed = False
        if len(tokens) < _OTHER_LEAST:
            return -1, 0
        places = np.flatnonzero(self._keys == _pairs(tokens[-2:])[0])[-_CANDIDATES:] + 1
        return _longest(self.tokens, places.astype(np.int32), tokens, _OTHER_LEAST)


def _pairs(tokens: Ints) -> Keys:
    """Of each token but the first."""
    wide = tokens.astype(np.int64)
    keys: Keys = (wide[:-1] << 32) | (wide[1:] & 0xFFFFFFFF)
    return keys


def _longest(source: Ints, places: Ints, tokens: Ints, least: int) -> tuple[int, int]:
    """Of places in `source` up to which two tokens agree with the last two of `tokens` the one where most do, the last
    of several, and how many; 0 where fewer than `least` do. source: may be the beginning of `tokens`."""
    if not len(places):
        return -1, 0
    length = 2
    while length < min(_LONGEST, len(tokens)):
        inside = places[places >= length]
        longer = inside[source[inside - length] == tokens[-1 - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return (int(places[-1]), length) if length >= least else (-1, 0)


def _kind(length: int) -> int:
    """Of agreements of so many tokens: the index of their share."""
    return min(length - _OWN_LEAST, len(_FIRST_SHARES) - 1)


def _following(source: Ints, first: int, count: int) -> list[int]:
    """Up to `count` tokens from a place on; what is beyond the end repeats what comes before it."""
    found: list[int] = source[first : first + max(0, count)].tolist()
    if _BETWEEN in found:
        return found[: found.index(_BETWEEN)]
    repeated = len(source) - first  # as long as the period
    while 0 < len(found) < count:
        found.append(found[len(found) - repeated])
    return found
