"""What is counted for each message with tokens: their number, and the gaps between them, equal where they arrive
together. Counters of prometheus_client take a lock and some checks for each value."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class TokenCounter(Collector):
    """One series. Used by one thread."""

    def __init__(self, name: str, text: str, labels: Sequence[str], values: Sequence[str]) -> None:
        """`values` are those of the labels."""
        self._name, self._text = name, text
        self._labels, self._values = labels, values
        self._count = 0

    def add(self, count: int) -> None:
        """So many tokens."""
        self._count += count

    def collect(self) -> Iterator[Metric]:
        """The series, for the registry."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        family.add_metric(self._values, self._count)
        yield family


class GapHistogram(Collector):
    """One series in seconds. Used by one thread."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        values: Sequence[str],
        bounds: Sequence[float],
    ) -> None:
        """`values` are those of the labels, `bounds` the upper ends of the buckets but the last, ascending."""
        self._name, self._text = name, text
        self._labels, self._values = labels, values
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        """So many gaps of this length."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        """The series, for the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = ["+Inf" if bound == inf else str(bound) for bound in (*self._bounds, inf)]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(self._values, buckets, self._sum)
        yield family
