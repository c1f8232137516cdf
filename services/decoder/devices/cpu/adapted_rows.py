"""Which rows of a step have segments at a product, and which have none."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.devices.base.adapters import Segment


@dataclass(frozen=True)
class AdaptedRows:
    """`rows`: int64 [n], ascending, those of any segment; `others`: the remaining ones; `places`: of each segment where
    its rows are among `rows`, None where they are all of them."""

    rows: Tensor
    others: Tensor
    places: Sequence[Tensor | None]


class AdaptedRowsCache:
    """Keeps what was found last: all layers of a step have segments of the same rows."""

    def __init__(self) -> None:
        self._known: tuple[int, list[Tensor], AdaptedRows] | None = None

    def of(self, segments: Sequence[Segment], count: int) -> AdaptedRows:
        """Of a step of `count` rows; there must be a segment."""
        rows = [segment.rows for segment in segments]
        known = self._known
        if known is not None and known[0] == count and _are_same(known[1], rows):
            return known[2]
        found = _find(rows, count)
        self._known = count, rows, found
        return found


def _are_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether they are the same tensors, which nobody changes."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _find(rows: Sequence[Tensor], count: int) -> AdaptedRows:
    has = torch.zeros(count, dtype=torch.bool)
    for some in rows:
        has[some] = True
    union = has.nonzero()[:, 0]
    place_of = has.cumsum(0) - 1
    places = [None if len(some) == len(union) else place_of[some] for some in rows]
    return AdaptedRows(union, (~has).nonzero()[:, 0], places)
