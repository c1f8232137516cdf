"""What one request met, and the latencies that follow from it. Seconds throughout, on one monotonic clock."""

from array import array
from dataclasses import dataclass, field

from benchmarks.load.objective import Objective


@dataclass(slots=True)
class Recording:
    """When a request was sent, when tokens came, and how it ended.

    `times[i]` is when the i-th event with tokens was read, `counts[i]` how many tokens it had.
    """

    sent: float
    ended: float = 0.0
    times: "array[float]" = field(default_factory=lambda: array("d"))
    counts: "array[int]" = field(default_factory=lambda: array("q"))
    prompt_tokens: int = 0
    output_tokens: int = 0  # by the server's count where it gives one, else those seen
    cached_tokens: int = 0
    error: str = ""

    @property
    def succeeded(self) -> bool:
        """A complete answer with at least one token."""
        return not self.error

    @property
    def ttft(self) -> float:
        """From sending to the first token."""
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        """From sending to the end of the answer."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Mean time of an output token after the first one; 0 for an answer of one token."""
        if self.output_tokens < 2:
            return 0.0
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Time between events with tokens, as a reader of the stream sees it."""
        return [now - before for before, now in zip(self.times, self.times[1:], strict=False)]

    @property
    def itl(self) -> list[float]:
        """Time between tokens: an event with n tokens counts as n gaps, evenly spaced."""
        spaced: list[float] = []
        for gap, count in zip(self.gaps, self.counts[1:], strict=True):
            spaced += [gap / count] * count
        return spaced

    def keeps(self, objective: Objective) -> bool:
        """Whether the request is good by an objective."""
        match objective.metric:
            case "ttft":
                met = self.ttft
            case "tpot":
                met = self.tpot
            case "itl":
                met = max(self.gaps, default=0.0)
            case _:
                met = self.e2el
        return met <= objective.limit_s
