"""How long steps took while somebody read along: what `--step-target-ms` bounds."""

from bisect import bisect_left

from tessera.scheduler.v1 import scheduler_pb2

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)


class StepDurations:
    """A histogram since the lease."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        """A step took so long."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    def message(self) -> scheduler_pb2.Durations:
        """All of it."""
        return scheduler_pb2.Durations(
            bounds_s=_BOUNDS_S, counts=self._counts, total_s=self._total_s
        )
