"""Series as prometheus_client writes them."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Metric,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from shared.telemetry.series import Distribution, Measured, Measures


class MeasuresCollector(Collector):
    """Reads measures whenever a page is asked for."""

    def __init__(self, *measures: Measures) -> None:
        self._measures = measures

    def collect(self) -> Iterator[Metric]:
        """All families, for the registry."""
        for measures in self._measures:
            yield from map(family_of, measures.read())


def process_registry(*measures: Measures) -> CollectorRegistry:
    """A registry of these, and of the series that prometheus_client has of a process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(MeasuresCollector(*measures))
    return registry


def text_of(registry: CollectorRegistry) -> bytes:
    """The page in Prometheus's text format."""
    return generate_latest(registry)


def family_of(measured: Measured) -> Metric:
    """A measured series as prometheus_client has it."""
    series = measured.series
    if series.kind == "histogram":
        histogram = HistogramMetricFamily(series.name, series.text, labels=series.labels)
        for labels, value in measured.rows:
            assert isinstance(value, Distribution)
            histogram.add_metric(labels, _buckets(value), value.total)
        return histogram
    family: CounterMetricFamily | GaugeMetricFamily
    if series.kind == "counter":
        family = CounterMetricFamily(series.name, series.text, labels=series.labels)
    else:
        family = GaugeMetricFamily(series.name, series.text, labels=series.labels)
    for labels, value in measured.rows:
        assert not isinstance(value, Distribution)
        family.add_metric(labels, value)
    return family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """How many lie at or below each bound."""
    below = accumulate(distribution.counts)
    names = [*(str(float(bound)) for bound in distribution.bounds), "+Inf"]
    return [(name, float(count)) for name, count in zip(names, below, strict=True)]
