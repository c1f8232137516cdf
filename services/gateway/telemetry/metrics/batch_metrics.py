"""Batches in metrics."""

from prometheus_client import CollectorRegistry, Counter


class BatchMetrics:
    """What this gateway does for batches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._batches = Counter(
            "tessera_batches",
            "Batches that this gateway brought to a status.",
            ["status"],
            registry=registry,
        )
        self._lines = Counter(
            "tessera_batch_lines",
            "Lines of batches that this gateway has answered, by result.",
            ["result"],
            registry=registry,
        )

    def reached(self, status: str) -> None:
        """A batch has this status now."""
        self._batches.labels(status).inc()

    def line(self, result: str) -> None:
        """A line was answered."""
        self._lines.labels(result).inc()
