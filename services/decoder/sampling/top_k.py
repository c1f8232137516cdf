"""The largest values of long rows, without sorting them.

Every row is folded into interleaved blocks of which only the maxima are looked at: the k-th largest
maximum is a lower bound of the k-th largest value, so few values are left to sort.
"""

import numpy as np

Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

# Blocks for each value wanted: more make the bound tighter and the maxima longer to sort.
_BLOCKS = 4
# From this length on it is worth to put value and place into one number for sorting.
_LONG = 1500


def largest(row: Row, k: int) -> tuple[Ids, Vector]:
    """The k largest values of one row without NaN, descending, and their places; of equal ones the
    lowest places first. All of them if the row is not longer than k.
    """
    if k <= 0:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    ids = _among(row, k) if k < len(row) else np.arange(len(row))
    values = row[ids]
    order = _order(values)[:k]
    return ids[order], values[order]


def _order(values: Vector) -> Ids:
    """Places by value, descending; of equal ones the first places first."""
    if len(values) < _LONG:
        return np.argsort(-values, kind="stable")
    # Numbers that hold value and place are sorted several times faster than places by value. The
    # bits of floats are in the order of their values once those of negative ones are turned over;
    # adding zero makes one zero of two.
    bits = (values + np.float32(0)).view(np.int32)
    bits ^= (bits >> 31) & np.int32(0x7FFFFFFF)
    keys = ~bits.astype(np.int64) << 32
    keys |= np.arange(len(values))
    keys.sort()
    keys &= 0xFFFFFFFF
    return keys


def _among(row: Row, k: int) -> Ids:
    """Places that hold the k largest values, not many more."""
    bound = _bound(row, k)
    if bound > -np.inf:
        return np.flatnonzero(row >= bound)
    # Nearly all is forbidden: of the forbidden no more than are needed to fill up.
    ids = np.flatnonzero(row > bound)
    rest = np.flatnonzero(row == bound)
    return np.concatenate([ids, rest[: max(0, k - len(ids))]])


def _bound(row: Row, k: int) -> np.float32:
    """Not larger than the k-th largest value."""
    depth = len(row) // (_BLOCKS * k)
    if depth < 2:
        bound: np.float32 = np.partition(row, -k)[-k]
        return bound
    width = len(row) // depth
    maxima = row[: width * depth].reshape(depth, width).max(axis=0)
    bound = np.partition(maxima, -k)[-k]
    return bound
