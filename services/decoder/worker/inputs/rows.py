"""The rows of a plan that will run."""

from dataclasses import dataclass

import numpy as np

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Longs = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Rows:
    """Rows of a plan that will run: `place` is each one's index in the plan."""

    place: Longs
    slot: Longs
    start: Longs
    count: Longs

    @property
    def end(self) -> Longs:
        """Number of computed tokens afterwards."""
        return self.start + self.count

    def select(self, index: Longs) -> "Rows":
        """Some of the rows, in the order given."""
        return Rows(self.place[index], self.slot[index], self.start[index], self.count[index])


def order_rows(rows: Rows) -> Rows:
    """Rows of one token first, otherwise as they were."""
    if bool((rows.count == 1).all()):
        return rows
    return rows.select(np.argsort(rows.count != 1, kind="stable"))
