"""Which tokens the grammars of sequences allow next, by llguidance."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from services.decoder.sampling.grammar_tokenizer import GrammarTokenizer
from services.decoder.sampling.logits_processors.token_masks import WORD, Bits, Grammar
from shared.errors import Internal, InvalidRequest, ServingError
from shared.text.rust_panic import panics_as_errors

if TYPE_CHECKING:
    from llguidance import LLMatcher

_KEPT = 256  # grammars that are read once for all requests with them
# The errors of a grammar that no token goes on; others are limits on what it takes to go on.
_NOTHING_LEFT = ("NoExtension", "NoExtensionBias")


@dataclass
class Following:
    """Where one output is in its grammar. `ends`: ids that end it wherever the grammar lets it end, beside those of
    the model; `has_ended`: one of either came."""

    matcher: "LLMatcher"
    ends: frozenset[int]
    has_ended: bool = False
    wrong: ServingError | None = None  # why it did not go on

    def copy(self) -> "Following":
        """The same for another output."""
        return replace(self, matcher=self.matcher.deep_copy())


class GrammarMatcher:
    """A `TokenMatcher` for grammars as `LLMatcher` takes them: Lark, or JSON with a list of grammars.

    Special tokens are no text: a grammar has them by `<name>` or `<[id]>` alone.
    """

    def __init__(self, tokenizer: "Future[GrammarTokenizer]") -> None:
        """tokenizer: of the model; while it is being made, and where it cannot be, no grammar is read."""
        self._tokenizer = tokenizer
        self._guard = threading.Lock()
        self._read: OrderedDict[bytes, LLMatcher] = OrderedDict()  # by digest, least used first
        self._slots: dict[int, Following] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def prepare(self, grammar: Grammar) -> Following:
        """See `TokenMatcher.prepare`."""
        known = self._tokenizer.result()
        ends = {token for token in grammar.stop_ids if known.is_special(token)}
        following = Following(self._prototype(grammar.text), known.end_ids | ends).copy()
        _go_on(following, grammar.output)
        if following.wrong is not None:
            raise following.wrong
        return following

    def introduce(self, slot: int, prepared: Following) -> None:
        """See `TokenMatcher.introduce`."""
        self._slots[slot] = prepared.copy()

    def fork(self, child: int, parent: int) -> None:
        """See `TokenMatcher.fork`."""
        self._slots[child] = self._slots[parent].copy()

    def drop(self, slot: int) -> None:
        """See `TokenMatcher.drop`."""
        del self._slots[slot]

    def commit(self, slot: int, token: int) -> None:
        """See `TokenMatcher.commit`. What is wrong with a token is found by the next `fill`."""
        _go_on(self._slots[slot], [token])

    def fill(self, bitmask_rows: Bits, slots: Sequence[int]) -> dict[int, ServingError]:
        """See `TokenMatcher.fill`."""
        wrong: dict[int, ServingError] = {}
        for row, slot in enumerate(slots):
            try:
                self._fill(bitmask_rows[row], self._slots[slot])
            except ServingError as error:
                wrong[row] = error
        return wrong

    def _fill(self, row: Bits, following: Following) -> None:
        if following.wrong is not None:
            raise following.wrong
        ends = np.fromiter(following.ends, np.int64)
        may_end = following.has_ended
        if may_end:
            row[:] = 0
        else:
            # Of all ids of the tokenizer, which may be more than the model's.
            found = np.frombuffer(following.matcher.compute_bitmask(), np.uint8)
            packed = found[: row.nbytes].view("<u4")
            row[: len(packed)] = packed
            row[len(packed) :] = 0
            # In an error only end tokens are allowed: the answer would end as if it were complete.
            if following.matcher.is_error():
                raise _failure(following.matcher)
            own = min(self._tokenizer.result().end_ids)
            may_end = bool(int(row[own // WORD]) >> own % WORD & 1)
        if may_end:
            np.bitwise_or.at(row, ends // WORD, (1 << (ends % WORD)).astype(np.uint32))

    def _prototype(self, text: str) -> "LLMatcher":
        """A grammar at its beginning, which nobody changes."""
        from llguidance import LLMatcher, LLParserLimits

        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        with self._guard:
            if digest in self._read:
                self._read.move_to_end(digest)
                return self._read[digest]
        tokenizer = self._tokenizer.result().tokenizer
        limits = LLParserLimits(verbose_errors=False)
        with panics_as_errors():
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest("INVALID_GRAMMAR", f"grammar: {_why(matcher)}", field="grammar")
        with self._guard:
            self._read[digest] = matcher
            if len(self._read) > _KEPT:
                self._read.popitem(last=False)
        return matcher


def _go_on(following: Following, tokens: Sequence[int]) -> None:
    """Takes tokens up to the one that ends the output; those behind it mean nothing."""
    if following.has_ended or following.wrong is not None:
        return
    end = next((n for n, token in enumerate(tokens) if token in following.ends), None)
    following.has_ended = end is not None
    matcher, wanted = following.matcher, list(tokens[:end])
    taken = matcher.try_consume_tokens(wanted)
    if matcher.is_error():
        following.wrong = _failure(matcher)
    elif taken < len(wanted):
        following.wrong = Internal(
            "GRAMMAR_LEFT", "grammar: what has been generated does not follow it"
        )


def _failure(matcher: "LLMatcher") -> ServingError:
    """Why it does not go on."""
    why = _why(matcher)
    if why in _NOTHING_LEFT:
        return InvalidRequest(
            "NO_TOKEN_LEFT", "grammar: no token of this model goes on from here", field="grammar"
        )
    return InvalidRequest(
        "GRAMMAR_TOO_COMPLEX",
        f"grammar: it cannot be followed any further ({why}); make it simpler",
        field="grammar",
    )


def _why(matcher: "LLMatcher") -> str:
    """What the library says, in one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
