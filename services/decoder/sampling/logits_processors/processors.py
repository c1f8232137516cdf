"""What changes a row's logits before a token is chosen: biases, masks, penalties.

Order as in vLLM: allowed ids, bad ids, words and runs, bias, stop ids before min_tokens, then penalties
(repetition over prompt and output, frequency and presence over the output).
"""

import copy
from collections.abc import Iterable

import numpy as np

from services.decoder.sampling.logits_processors.bad_words import BadWords
from services.decoder.sampling.logits_processors.repeated_ngrams import RepeatedNgrams
from services.decoder.sampling.logits_processors.token_counts import TokenCounts
from shared.errors import InvalidRequest
from tessera.common.v1.sampling_pb2 import SamplingParams

Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

_FORBIDDEN = np.float32(-np.inf)


def needs_adjustment(params: SamplingParams) -> bool:
    """Whether a sequence's logits are ever changed."""
    return bool(
        params.allowed_token_ids
        or params.bad_token_ids
        or params.bad_words
        or params.first_bad_token_ids
        or params.no_repeat_ngram_size > 0
        or params.logit_bias
        or params.min_tokens > 0
        or _has_penalty(params)
    )


class Adjustments:
    """One sequence's changes, with counts of its tokens where penalties need them."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt: Ids, output: Ids) -> None:
        """Raises InvalidRequest for ids outside the vocabulary."""
        self._allowed = _ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        words = [tuple(word.ids) for word in params.bad_words]
        _ids("bad_words", (token for word in words for token in word), vocab_size)
        if not all(words):
            raise InvalidRequest(
                "INVALID_SAMPLING", "bad_words has an empty one", field="bad_words"
            )
        single = [word[0] for word in words if len(word) == 1]
        self._bad = _ids("bad_token_ids", [*params.bad_token_ids, *single], vocab_size)
        self._bad_words = BadWords([word for word in words if len(word) > 1], output.tolist())
        self._first_bad = _ids("first_bad_token_ids", params.first_bad_token_ids, vocab_size)
        self._ngrams: RepeatedNgrams | None = None
        if params.no_repeat_ngram_size > 0:
            self._ngrams = RepeatedNgrams(params.no_repeat_ngram_size, prompt, output)
        self._vocab_size = vocab_size
        self._bias_ids = _ids("logit_bias", params.logit_bias.keys(), vocab_size)
        self._bias = np.asarray(list(params.logit_bias.values()), np.float32)
        self._min_tokens = params.min_tokens
        self._stops = _inside(np.asarray(list(params.stop_token_ids), np.int64), vocab_size)
        self._counts: TokenCounts | None = None
        if _has_penalty(params):
            # Placeholders of media are outside the text; those beyond the vocabulary do not count.
            self._counts = TokenCounts(
                _inside(prompt, vocab_size),
                _inside(output, vocab_size),
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            )

    def fork(self) -> "Adjustments":
        """The same for a child: later tokens of one do not count for the other."""
        child = copy.copy(self)
        child._bad_words = self._bad_words.fork()
        if self._ngrams is not None:
            child._ngrams = self._ngrams.fork()
        if self._counts is not None:
            child._counts = self._counts.fork()
        return child

    def commit(self, token: int) -> None:
        """Counts a sampled token."""
        if self._counts is not None:
            self._counts.commit(token)
        if self._bad_words:
            self._bad_words.commit(token)
        if self._ngrams is not None:
            self._ngrams.commit(token)

    @property
    def stops(self) -> Ids:
        """Ids that `apply` forbids before min_tokens."""
        return self._stops

    def is_too_short(self, output_len: int) -> bool:
        """Whether an output of so many tokens has fewer than min_tokens."""
        return output_len < self._min_tokens

    def apply(self, logits: Row, output_len: int, *, must_end: bool = False) -> None:
        """Changes one row in place; `output_len` tokens have been generated before this one. must_end: nothing but ids
        that end the output may come, whatever min_tokens says."""
        if len(self._allowed):
            kept = logits[self._allowed]
            logits.fill(_FORBIDDEN)
            logits[self._allowed] = kept
        self._forbid(logits, output_len)
        if len(self._bias_ids):
            logits[self._bias_ids] += self._bias
        if self.is_too_short(output_len) and not must_end:
            logits[self._stops] = _FORBIDDEN
        if self._counts is not None:
            self._counts.penalize(logits)

    @property
    def only_lowers(self) -> bool:
        """Whether `apply` never raises a logit."""
        only_lower = self._counts is None or self._counts.only_lowers
        return only_lower and bool((self._bias <= 0).all())

    def keeps(self, token: int, output_len: int, *, must_end: bool = False) -> bool:
        """Whether `apply` would leave a token's logit as it is."""
        if len(self._allowed) and token not in self._allowed:
            return False
        if token in self._bad or token in self._bias_ids:
            return False
        if output_len == 0 and token in self._first_bad:
            return False
        if self.is_too_short(output_len) and not must_end and token in self._stops:
            return False
        if self._bad_words and token in self._bad_words.forbidden():
            return False
        if self._ngrams is not None and token in self._ngrams.forbidden():
            return False
        return self._counts is None or token not in self._counts

    def _forbid(self, logits: Row, output_len: int) -> None:
        if len(self._bad):
            logits[self._bad] = _FORBIDDEN
        if len(self._first_bad) and output_len == 0:
            logits[self._first_bad] = _FORBIDDEN
        if self._bad_words and (ids := self._bad_words.forbidden()):
            logits[ids] = _FORBIDDEN
        if self._ngrams is not None:
            logits[_inside(self._ngrams.forbidden(), self._vocab_size)] = _FORBIDDEN


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def _inside(ids: Ids, vocab_size: int) -> Ids:
    return ids[(ids >= 0) & (ids < vocab_size)]


def _ids(field: str, given: Iterable[int], vocab_size: int) -> Ids:
    ids = np.asarray(list(given), np.int64)
    if len(_inside(ids, vocab_size)) != len(ids):
        raise InvalidRequest(
            "INVALID_SAMPLING", f"{field} names an id outside [0, {vocab_size})", field=field
        )
    return ids
