"""Records of the token log, one at a time."""

from collections.abc import Sequence

import numpy as np

from shared.queue.token_log import encode_records


def logprob_record(token: int, ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
    """The record of a token with log-probabilities; `ids[0]` is the token itself, then the top ones."""
    values = np.asarray(logprobs, "<f4")
    top_ids = np.asarray(ids[1:], "<i4")[None]
    return encode_records([token], values[:1], top_ids, values[None, 1:], len(ids) - 1)
