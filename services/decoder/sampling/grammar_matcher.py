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
from services.decoder.sampling.logits_processors.token_masks import WORD, BitRow, Bits, Grammar
from shared.errors import Internal, InvalidRequest, ServingError
from shared.text.rust_panic import panics_as_errors

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

# Grammars that are read once for all requests with them: how many, and bytes of their texts. What is made of one takes
# up to a hundred times as much.
_KEPT = 256
_KEPT_BYTES = 1 << 20
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
        """The same for another output; one that has failed where the library fails."""
        try:
            with panics_as_errors():
                return replace(self, matcher=self.matcher.deep_copy())
        except Exception as error:  # the library has no class of its own
            return replace(self, wrong=_internal(error))


class GrammarMatcher:
    """A `TokenMatcher` for grammars as `LLMatcher` takes them: Lark, or JSON with a list of grammars.

    Special tokens are no text: a grammar has them by `<name>` or `<[id]>` alone.
    """

    def __init__(self, tokenizer: "Future[GrammarTokenizer]") -> None:
        """tokenizer: of the model; while it is being made, and where it cannot be, no grammar is read."""
        self._tokenizer = tokenizer
        self._guard = threading.Lock()
        # By digest, least used first, with the bytes of the text.
        self._read: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._read_bytes = 0
        self._slots: dict[int, Following] = {}
        self._executor: LLExecutor | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def prepare(self, grammar: Grammar) -> Following:
        """See `TokenMatcher.prepare`."""
        known = self._known()
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
        several = [self._slots[slot] for slot in slots]
        for row, (following, mask) in enumerate(zip(several, self._compute(several), strict=True)):
            try:
                self._fill(bitmask_rows[row], following, mask)
            except ServingError as error:
                wrong[row] = error
        return wrong

    def _compute(self, several: Sequence[Following]) -> "Sequence[BitRow | None]":
        """Of each that goes on the tokens that may come next, None where the library fails: of all ids of the
        tokenizer, which may be more than the model's. All in one call, which lets other threads run."""
        found: list[BitRow | None] = [None] * len(several)
        going = [i for i, one in enumerate(several) if one.wrong is None and not one.has_ended]
        if not going:
            return found
        words = -(-self._tokenizer.result().tokenizer.vocab_size // WORD)
        masks = np.empty((len(going), words), np.uint32)
        matchers = [(several[i].matcher, row) for row, i in enumerate(going)]
        try:
            with panics_as_errors():
                if self._executor is None:
                    self._executor = _executor()
                self._executor.unsafe_compute_mask_ptr(
                    matchers, masks.ctypes.data, masks.strides[0], len(masks)
                )
        except Exception:  # the library has no class of its own; which of them it is follows
            return found
        for row, i in enumerate(going):
            found[i] = masks[row]
        return found

    def _fill(self, row: BitRow, following: Following, mask: "BitRow | None") -> None:
        if following.wrong is not None:
            raise following.wrong
        # Files may name ends that the model does not have.
        ends = np.fromiter((t for t in following.ends if t < WORD * len(row)), np.int64)
        may_end = following.has_ended
        if may_end:
            row[:] = 0
        else:
            if mask is None:
                mask = np.frombuffer(_mask(following.matcher), np.uint32)
            count = min(len(row), len(mask))
            row[:count] = mask[:count]
            row[count:] = 0
            # In an error only end tokens are allowed: the answer would end as if it were complete.
            if following.matcher.is_error():
                raise _failure(following.matcher)
            own = [t for t in self._tokenizer.result().end_ids if t < WORD * len(row)]
            may_end = any(int(row[t // WORD]) >> t % WORD & 1 for t in own)
        if may_end:
            np.bitwise_or.at(row, ends // WORD, (1 << (ends % WORD)).astype(np.uint32))

    def _known(self) -> GrammarTokenizer:
        """Waits for the tokenizer. Raises InvalidRequest, anew each time, where there is none: an error that is raised
        again keeps what every caller had."""
        error = self._tokenizer.exception()
        if error is not None:
            reason = error.reason if isinstance(error, ServingError) else "UNSUPPORTED_SAMPLING"
            raise InvalidRequest(reason, str(error), field="grammar")
        return self._tokenizer.result()

    def _prototype(self, text: str) -> "LLMatcher":
        """A grammar at its beginning, which nobody changes."""
        from llguidance import LLMatcher, LLParserLimits

        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        with self._guard:
            if digest in self._read:
                self._read.move_to_end(digest)
                return self._read[digest][0]
        tokenizer = self._known().tokenizer
        limits = LLParserLimits(verbose_errors=False)
        try:
            with panics_as_errors():
                matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        except Exception as error:  # the library has no class of its own
            raise InvalidRequest("INVALID_GRAMMAR", f"grammar: {error}", field="grammar") from error
        if matcher.is_error():
            raise InvalidRequest("INVALID_GRAMMAR", f"grammar: {_why(matcher)}", field="grammar")
        self._keep(digest, matcher, len(text.encode()))
        return matcher

    def _keep(self, digest: bytes, matcher: "LLMatcher", size: int) -> None:
        with self._guard:
            if digest in self._read:  # read twice at once
                return
            self._read[digest] = matcher, size
            self._read_bytes += size
            while len(self._read) > _KEPT or (
                self._read_bytes > _KEPT_BYTES and len(self._read) > 1
            ):
                _, (_, gone) = self._read.popitem(last=False)
                self._read_bytes -= gone


def _go_on(following: Following, tokens: Sequence[int]) -> None:
    """Takes tokens up to the one that ends the output; those behind it mean nothing."""
    if following.has_ended or following.wrong is not None:
        return
    end = next((n for n, token in enumerate(tokens) if token in following.ends), None)
    following.has_ended = end is not None
    matcher, wanted = following.matcher, list(tokens[:end])
    try:
        with panics_as_errors():
            taken = matcher.try_consume_tokens(wanted)
    except Exception as error:  # the library has no class of its own
        following.wrong = _internal(error)
        return
    if matcher.is_error():
        following.wrong = _failure(matcher)
    elif taken < len(wanted):
        following.wrong = Internal(
            "GRAMMAR_LEFT",
            "grammar: what has been generated does not follow it",
            field="grammar",
        )


def _executor() -> "LLExecutor":
    """With one thread: the step computes on the others."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads=1)


def _mask(matcher: "LLMatcher") -> bytes:
    """Bits of the tokens that may come next. Raises Internal."""
    try:
        with panics_as_errors():
            return matcher.compute_bitmask()
    except Exception as error:  # the library has no class of its own
        raise _internal(error) from error


def _internal(error: Exception) -> ServingError:
    return Internal(
        "GRAMMAR_FAILED", f"grammar: it could not be followed ({error})", field="grammar"
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
