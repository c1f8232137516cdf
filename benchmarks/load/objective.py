"""A service level objective: a latency that a good request stays within."""

from dataclasses import dataclass
from typing import Self

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Objective:
    """A metric of one request and its limit in seconds. `itl` is the request's longest gap."""

    metric: str
    limit_s: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads "ttft:500", in milliseconds. Raises ValueError."""
        metric, _, limit = text.partition(":")
        if metric not in METRICS:
            raise ValueError(f"{text!r} names none of {', '.join(METRICS)}; write ttft:500,tpot:50")
        try:
            milliseconds = float(limit)
        except ValueError:
            raise ValueError(f"{text!r} has no number of milliseconds; write ttft:500") from None
        if not milliseconds > 0:
            raise ValueError(f"the limit in {text!r} must be above 0")
        return cls(metric, milliseconds / 1000)
