"""Pauses between attempts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Pauses that double from `first_s` up to `longest_s`."""

    first_s: float
    longest_s: float

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, at least one."""
        return min(self.first_s * 2.0 ** min(failures - 1, 64), self.longest_s)
