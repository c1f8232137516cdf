"""How many tokens steps computed."""

from bisect import bisect_left

from tessera.scheduler.v1 import scheduler_pb2

_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # those of vLLM


class StepTokens:
    """A histogram since the lease."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._total = 0

    def add(self, tokens: int) -> None:
        """A step with rows computed so many."""
        self._counts[bisect_left(_BOUNDS, tokens)] += 1
        self._total += tokens

    def message(self) -> scheduler_pb2.TokenCounts:
        """All of it."""
        return scheduler_pb2.TokenCounts(bounds=_BOUNDS, counts=self._counts, total=self._total)
