"""What changes a row's logits before a token is chosen: biases, masks, penalties.

Order as in vLLM: allowed ids, bad ids, bias, stop ids before min_tokens, then penalties (repetition
over prompt and output, Keskar et al., 2019; frequency and presence over the output).
"""

import copy
from collections.abc import Iterable

import numpy as np

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
        or params.logit_bias
        or params.min_tokens > 0
        or _has_penalty(params)
    )


class Adjustments:
    """One sequence's changes, with counts of its tokens where penalties need them."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt: Ids, output: Ids) -> None:
        """Raises InvalidRequest for ids outside the vocabulary."""
        self._allowed = _ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        self._bad = _ids("bad_token_ids", params.bad_token_ids, vocab_size)
        self._bias_ids = _ids("logit_bias", params.logit_bias.keys(), vocab_size)
        self._bias = np.asarray(list(params.logit_bias.values()), np.float32)
        self._min_tokens = params.min_tokens
        self._stops = _inside(np.asarray(list(params.stop_token_ids), np.int64), vocab_size)
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._counts: Row | None = None
        if _has_penalty(params):
            # Placeholders of media are outside the text; those beyond the vocabulary do not count.
            self._counts = np.zeros(vocab_size, np.float32)
            np.add.at(self._counts, _inside(output, vocab_size), 1)
            self._seen = self._counts > 0
            self._seen[_inside(prompt, vocab_size)] = True

    def fork(self) -> "Adjustments":
        """The same for a child: later tokens of one do not count for the other."""
        child = copy.copy(self)
        if self._counts is not None:
            child._counts = self._counts.copy()
            child._seen = self._seen.copy()
        return child

    def commit(self, token: int) -> None:
        """Counts a sampled token."""
        if self._counts is not None:
            self._counts[token] += 1
            self._seen[token] = True

    def apply(self, logits: Row, output_len: int) -> None:
        """Changes one row in place; `output_len` tokens have been generated before this one."""
        if len(self._allowed):
            kept = logits[self._allowed]
            logits.fill(_FORBIDDEN)
            logits[self._allowed] = kept
        logits[self._bad] = _FORBIDDEN
        logits[self._bias_ids] += self._bias
        if output_len < self._min_tokens:
            logits[self._stops] = _FORBIDDEN
        if self._counts is not None:
            self._penalize(logits, self._counts)

    def _penalize(self, logits: Row, counts: Row) -> None:
        if self._repetition != 1:
            seen = np.flatnonzero(self._seen)
            old = logits[seen]
            logits[seen] = np.where(old > 0, old / self._repetition, old * self._repetition)
        if self._frequency or self._presence:
            used = np.flatnonzero(counts)
            logits[used] -= self._frequency * counts[used] + self._presence


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
