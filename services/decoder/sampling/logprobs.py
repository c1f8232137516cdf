"""Log-probabilities of raw logits: before temperature, penalties and masks, as vLLM reports them."""

import numpy as np

from services.decoder.sampling.top_k import largest

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


def log_softmax(logits: Floats) -> Floats:
    """[rows, vocabulary], sums in float64."""
    result: Floats = np.empty(logits.shape, np.float32)
    for row, out in zip(logits, result, strict=True):
        np.subtract(row, log_total(row), out=out)
    return result


def log_total(row: Vector) -> np.float64:
    """What a row's logits are above its log-probabilities: the log of the sum of exponentials."""
    largest_value = row.max()
    shifted = row - largest_value
    # float64 only in the sum: the exponentials are at most 1.
    total: np.float64 = np.exp(shifted, out=shifted).sum(dtype=np.float64)
    result: np.float64 = np.float64(largest_value) + np.log(total)
    return result


def top(logprobs: Vector, k: int) -> tuple[Ids, Vector]:
    """The k largest of one row, descending; of equal ones the lowest ids first."""
    ids, values = largest(logprobs, k)
    return ids.astype(np.int32), values


def scores(row: Vector, k: int) -> tuple[np.float64, Ids, Vector]:
    """`log_total` of raw logits, and the k most likely ids with their log-probabilities."""
    total = log_total(row)
    ids, values = top(row, k)
    return total, ids, (values - total).astype(np.float32)
