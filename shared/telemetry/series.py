"""What a service counts for its page of metrics, as plain numbers: nothing is formatted before the page is asked."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

# Upper ends of buckets, in seconds: of work from a millisecond to a minute.
WORK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Distribution:
    """How many values fell below each bound, and their sum. Written by one thread; another may read it meanwhile, and
    then sees all but the value that is being added.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ends, inclusive, of all buckets but the last, ascending."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Iterable[int], total: float) -> "Distribution":
        """One that was counted elsewhere; `counts` are those of the buckets, one more than bounds."""
        made = cls(bounds)
        made.counts, made.total = list(counts), total
        return made

    def add(self, value: float, times: int = 1) -> None:
        """So many values of this size."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


Value = int | float | Distribution


@dataclass(frozen=True, slots=True)
class Measured:
    """A series with its values at one moment, each under the values of the series' labels."""

    series: "Series"
    rows: Sequence[tuple[tuple[str, ...], Value]]


@dataclass(frozen=True, slots=True)
class Series:
    """What one series means. A counter's name is without the `_total` that pages add; `unit` is "" for plain numbers
    of what the name says.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    unit: str = ""

    def of(self, value: Value) -> Measured:
        """Its value, without labels."""
        return Measured(self, [((), value)])

    def by(self, values: Iterable[tuple[tuple[str, ...], Value]]) -> Measured:
        """Its values by those of its labels."""
        return Measured(self, list(values))


class Measures(Protocol):
    """The counts of one service."""

    def read(self) -> Iterator[Measured]:
        """All series as they are now; called on the event loop."""
        ...
