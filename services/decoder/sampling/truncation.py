"""Choosing a token: temperature, top-k, top-p, min-p and the inverse of the cumulative sum.

Tokens are ordered by logit descending, equal ones by id. Rows are independent: a row's token does
not depend on the others beside it. Rows are looked at one by one where they are long, because a row
then stays in the processor's cache; what is left of them is short, and done for all rows at once.
"""

from dataclasses import dataclass

import numpy as np

from services.decoder.sampling.top_k import largest

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Doubles = np.ndarray[tuple[int, int], np.dtype[np.float64]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Masks = np.ndarray[tuple[int, int], np.dtype[np.bool_]]
Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]

# Candidates looked at, first and again, before a row is sorted as a whole.
_CANDIDATES = (256, 4096)
# Candidates of several rows that are handled together: as many as stay in the cache.
_TABLE = 1 << 16
# Places summed at a time when a whole row is inverted.
_BLOCK = 512


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


def choose(logits: Floats, rows: Ids, settings: Truncation, uniform: Vector) -> Ids:
    """For each of `rows` of logits [n, vocabulary] the token whose share of [0, 1) in id order holds
    the number. `settings` and `uniform` are in the order of `rows`.
    """
    tokens = np.empty(len(rows), np.int64)
    limited = settings.limited
    for place in np.flatnonzero(~limited).tolist():
        weights = _weights(logits[rows[place]], settings.temperature[place])
        tokens[place] = _invert_row(weights, float(uniform[place]))
    bound = np.flatnonzero(limited)
    if len(bound):
        tokens[bound] = _choose_limited(logits, rows[bound], settings.rows(bound), uniform[bound])
    return tokens


def _weights(row: Row, temperature: np.float32) -> Row:
    """Probabilities times a constant, the largest 1, in float32."""
    scaled: Row = row - row.max()
    scaled /= temperature
    np.exp(scaled, out=scaled)
    return scaled


def _choose_limited(logits: Floats, rows: Ids, settings: Truncation, uniform: Vector) -> Ids:
    vocabulary = logits.shape[1]
    tokens = np.full(len(rows), -1, np.int64)
    open_rows = np.arange(len(rows))  # these keep more than the candidates
    for size in (*_CANDIDATES, vocabulary):
        size = min(max(size, int(settings.top_k[open_rows].max())), vocabulary)
        at_once = max(1, _TABLE // size)
        for start in range(0, len(open_rows), at_once):
            some = open_rows[start : start + at_once]
            tokens[some] = _choose_among(
                size, logits, rows[some], settings.rows(some), uniform[some]
            )
        open_rows = np.flatnonzero(tokens < 0)
        if not len(open_rows):
            break
    return tokens


def _choose_among(
    size: int, logits: Floats, rows: Ids, settings: Truncation, uniform: Vector
) -> Ids:
    """Truncates the `size` largest of each row and draws; -1 where they do not suffice."""
    ids, ranked, total = _rank(size, logits, rows, settings)
    kept = ranked >= settings.min_p[:, None]
    kept &= _within_top_k(ranked.shape, settings)
    # Where all candidates pass, more tokens outside may pass as well.
    open_ended = kept.all(axis=1) & (settings.top_k == 0) & (size < logits.shape[1])
    wanted = np.flatnonzero(settings.top_p < 1.0)
    if len(wanted):
        cut = np.where(kept[wanted], ranked[wanted], 0.0)
        before = np.cumsum(cut, axis=1)
        # What top-p is a share of: the weight of all tokens that top-k and min-p keep.
        some = total[wanted]
        goal = settings.top_p[wanted] * np.where(np.isnan(some), before[:, -1], some)
        # Only of a row that min-p does not limit either is the whole weight known.
        enough = (before[:, -1] >= goal) & ~np.isnan(some)
        open_ended[wanted] &= ~enough
        kept[wanted] &= (before - cut) < goal[:, None]
        kept[wanted, 0] = True
    tokens = _draw(ids, np.where(kept, ranked, 0.0), uniform, logits.shape[1])
    tokens[open_ended] = -1
    return tokens


def _draw(ids: Table, weights: Doubles, uniform: Vector, vocabulary: int) -> Ids:
    """Inverts the weights in the order of their ids."""
    if ids.shape[1] == vocabulary:
        by_id = np.empty_like(weights)
        np.put_along_axis(by_id, ids, weights, 1)
        return _invert(by_id, uniform)
    order = np.argsort(ids, axis=1)
    places = _invert(np.take_along_axis(weights, order, 1), uniform)
    picked = np.take_along_axis(order, places[:, None], 1)
    return np.take_along_axis(ids, picked, 1)[:, 0]


def _rank(
    size: int, logits: Floats, rows: Ids, settings: Truncation
) -> tuple[Table, Doubles, Vector]:
    """Of each row the `size` likeliest ids, their weights, and the weight of all its tokens where
    only top-p limits it, else NaN.
    """
    ids = np.empty((len(rows), size), np.int64)
    values = np.empty((len(rows), size), np.float32)
    total = np.full(len(rows), np.nan)
    needed = ((settings.top_k == 0) & (settings.min_p == 0)).tolist()
    for place, row in enumerate(rows.tolist()):
        ids[place], values[place] = largest(logits[row], size)
        if needed[place]:
            # One row at a time: a sum with conversion is cut into buffers from its beginning on.
            weights = _weights(logits[row], settings.temperature[place])
            total[place] = weights.sum(dtype=np.float64)
    values -= values[:, :1].copy()
    values /= settings.temperature[:, None]
    return ids, np.exp(values, out=values).astype(np.float64), total


def _within_top_k(shape: tuple[int, ...], settings: Truncation) -> Masks:
    ranks = np.arange(shape[1])[None, :]
    limit = np.where(settings.top_k > 0, settings.top_k, shape[1])
    result: Masks = ranks < limit[:, None]
    return result


def _invert(weights: Doubles, uniform: Vector) -> Ids:
    """The first place where the running sum passes uniform * total. Zero weights are passed by."""
    sums = np.cumsum(weights, axis=1)
    total = sums[:, -1]
    # uniform < 1, yet the product may round up to the total itself.
    goal = np.minimum(uniform * total, np.nextafter(total, 0.0))
    result: Ids = (sums > goal[:, None]).argmax(axis=1)
    return result


def _invert_row(weights: Row, uniform: float) -> int:
    """The same for one long row: which block of places, then which place."""
    whole = len(weights) // _BLOCK * _BLOCK
    doubles = weights.astype(np.float64)
    blocks = doubles[:whole].reshape(-1, _BLOCK).sum(axis=1)
    ends = np.cumsum(np.append(blocks, doubles[whole:].sum()))
    goal = min(uniform * ends[-1], np.nextafter(ends[-1], 0.0))
    block = int((ends > goal).argmax())
    before = ends[block - 1] if block else 0.0
    part = doubles[block * _BLOCK : min((block + 1) * _BLOCK, len(doubles))]
    past = before + np.cumsum(part) > goal
    # The block's sum and its running sum may differ in the last bit: take its last token then.
    inside = int(past.argmax()) if past.any() else int(np.flatnonzero(part)[-1])
    return block * _BLOCK + inside
