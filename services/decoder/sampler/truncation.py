"""Choosing a token: temperature, top-k, top-p, min-p and the inverse of the cumulative sum.

Ties are ordered by id. Rows are independent: a row's token does not depend on the others beside it.
"""

from dataclasses import dataclass

import numpy as np

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Doubles = np.ndarray[tuple[int, int], np.dtype[np.float64]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]

# Candidates looked at before a row is sorted as a whole.
_CANDIDATES = 256


@dataclass(frozen=True)
class Truncation:
    """Settings of m rows: temperature > 0; top_k 0, top_p 1 and min_p 0 keep all tokens."""

    temperature: "np.ndarray[tuple[int], np.dtype[np.float32]]"
    top_k: "np.ndarray[tuple[int], np.dtype[np.int32]]"
    top_p: Vector
    min_p: Vector

    def rows(self, index: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> "Truncation":
        """The settings of some rows."""
        return Truncation(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index]
        )

    @property
    def limited(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Which rows do not keep all tokens."""
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


def choose(logits: Floats, settings: Truncation, uniform: Vector) -> Ids:
    """The token of each row [m, vocabulary] whose share of [0, 1) in id order holds the number."""
    weights = _weights(logits, settings.temperature)
    limited = settings.limited
    tokens = np.empty(len(logits), np.int64)
    free = np.flatnonzero(~limited)
    if len(free):
        tokens[free] = _invert(weights[free].astype(np.float64), uniform[free])
    bound = np.flatnonzero(limited)
    if len(bound):
        tokens[bound] = _choose_limited(weights[bound], settings.rows(bound), uniform[bound])
    return tokens


def _weights(logits: Floats, temperature: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> Floats:
    """Probabilities times a constant, the largest 1, in float32."""
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature[:, None]
    result: Floats = np.exp(scaled, out=scaled)
    return result


def _choose_limited(weights: Floats, settings: Truncation, uniform: Vector) -> Ids:
    vocabulary = weights.shape[1]
    size = max(_CANDIDATES, int(settings.top_k.max()))
    tokens = np.full(len(weights), -1, np.int64)
    if size < vocabulary:
        candidates = _largest(weights, size)
        rest = np.ascontiguousarray(np.take_along_axis(weights, candidates, 1))
        tokens = _choose_among(candidates, rest, weights, settings, uniform)
    open_rows = np.flatnonzero(tokens < 0)  # these keep more than the candidates
    if len(open_rows):
        left = weights[open_rows]
        everything = np.broadcast_to(np.arange(vocabulary), left.shape)
        tokens[open_rows] = _choose_among(
            everything, left, left, settings.rows(open_rows), uniform[open_rows]
        )
    return tokens


def _largest(weights: Floats, size: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """Ids of at least the `size` largest of each row, ascending; of equal ones the lowest ids."""
    ids = np.argpartition(weights, -size, axis=1)[:, -size:]
    ids.sort(axis=1)
    smallest = np.take_along_axis(weights, ids, 1).min(axis=1)
    # A tie across the border may have been cut anywhere: choose again, stably.
    ties = np.flatnonzero((weights >= smallest[:, None]).sum(axis=1) > size)
    for row in ties:
        ids[row] = np.sort(np.argsort(-weights[row], kind="stable")[:size])
    return ids


def _choose_among(
    ids: "np.ndarray[tuple[int, int], np.dtype[np.int64]]",
    weights: Floats,
    whole: Floats,
    settings: Truncation,
    uniform: Vector,
) -> Ids:
    """Truncates candidates (ids ascending) and draws; -1 where the candidates do not suffice."""
    order = np.argsort(-weights, axis=1, kind="stable")  # probability descending, id ascending
    ranked = np.take_along_axis(weights, order, 1).astype(np.float64)
    kept = ranked >= settings.min_p[:, None]
    kept &= _within_top_k(ranked.shape, settings)
    complete = ids.shape[1] == whole.shape[1]
    open_ended = np.zeros(len(ids), bool)
    if not complete:
        # All candidates pass: more tokens outside may pass as well.
        open_ended = kept.all(axis=1) & (settings.top_k == 0) & (settings.min_p > 0)
    wanted = np.flatnonzero(settings.top_p < 1.0)
    if len(wanted):
        cut = np.where(kept[wanted], ranked[wanted], 0.0)
        total = _total(cut, whole[wanted], settings.rows(wanted))
        before = np.cumsum(cut, axis=1)
        goal = settings.top_p[wanted] * total
        reached = before[:, -1] >= goal
        open_ended[wanted] |= ~reached & (not complete) & (settings.top_k[wanted] == 0)
        kept[wanted] &= (before - cut) < goal[:, None]
        kept[wanted, 0] = True
    elif not complete:
        open_ended |= (settings.top_k == 0) & (settings.min_p == 0)
    by_id = np.empty_like(ranked)
    np.put_along_axis(by_id, order, np.where(kept, ranked, 0.0), 1)
    places = _invert(by_id, uniform)
    tokens = ids[np.arange(len(ids)), places].astype(np.int64)
    tokens[open_ended] = -1
    return tokens


def _within_top_k(
    shape: tuple[int, ...], settings: Truncation
) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
    ranks = np.arange(shape[1])[None, :]
    limit = np.where(settings.top_k > 0, settings.top_k, shape[1])
    result: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = ranks < limit[:, None]
    return result


def _total(cut: Doubles, whole: Floats, settings: Truncation) -> Vector:
    """What top-p is a share of: the weight of all tokens that top-k and min-p keep."""
    total: Vector = np.cumsum(cut, axis=1)[:, -1]
    plain = (settings.top_k == 0) & (settings.min_p == 0)
    if plain.any():
        # Converted first: a sum with conversion is cut into buffers that depend on the batch.
        total = np.where(plain, whole.astype(np.float64).sum(axis=1), total)
    return total


def _invert(weights: Doubles, uniform: Vector) -> Ids:
    """The first place where the running sum passes uniform * total. Zero weights are passed by."""
    sums = np.cumsum(weights, axis=1)
    total = sums[:, -1]
    # uniform < 1, yet the product may round up to the total itself.
    goal = np.minimum(uniform * total, np.nextafter(total, 0.0))
    result: Ids = (sums > goal[:, None]).argmax(axis=1)
    return result
