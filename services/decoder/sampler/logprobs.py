"""Log-probabilities of raw logits: before temperature, penalties and masks, as vLLM reports them."""

import numpy as np

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


def log_softmax(logits: Floats) -> Floats:
    """[rows, vocabulary], sums in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(shifted).astype(np.float64).sum(axis=1, keepdims=True))
    result: Floats = (shifted - total).astype(np.float32)
    return result


def top(logprobs: Vector, k: int) -> tuple[Ids, Vector]:
    """The k largest of one row, descending; of equal ones the lowest ids first."""
    k = min(k, len(logprobs))
    if k == 0:
        return np.empty(0, np.int32), np.empty(0, np.float32)
    border = np.partition(logprobs, -k)[-k]
    ids = np.flatnonzero(logprobs >= border)
    ids = ids[np.argsort(-logprobs[ids], kind="stable")[:k]]
    return ids.astype(np.int32), logprobs[ids]
