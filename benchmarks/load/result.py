"""What all requests of a run make together: throughput, latencies, goodput. Keys as `vllm bench serve` writes them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.load.objective import Objective
from benchmarks.load.recording import Recording

# Name in keys -> what it is. `gap` is ours: what others call ITL is a gap where a server joins tokens in one event.
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token, the first excluded",
    "itl": "between tokens",
    "gap": "between events with tokens",
    "e2el": "end to end",
}
PERCENTILES = (90, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """One latency over a run, in seconds; NaN where nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Percentiles are interpolated linearly between the nearest values."""
        if not values:
            nan = float("nan")
            return cls(nan, nan, nan, dict.fromkeys(PERCENTILES, nan))
        data = np.asarray(values, np.float64)
        ranks = np.percentile(data, PERCENTILES)
        found = {p: float(v) for p, v in zip(PERCENTILES, ranks, strict=True)}
        return cls(float(data.mean()), float(np.median(data)), float(data.std()), found)


@dataclass(frozen=True, slots=True)
class Result:
    """A measured run. Counts and rates are of requests that succeeded."""

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    good: int | None  # requests within all objectives, None where there are none
    latencies: dict[str, Summary]
    errors: dict[str, int]
    client_cpu_s: float

    @property
    def requests_per_s(self) -> float:
        """Requests completed a second."""
        return self.completed / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens generated a second."""
        return self.output_tokens / self.duration_s

    @property
    def total_tokens_per_s(self) -> float:
        """Tokens of prompts and answers a second."""
        return (self.input_tokens + self.output_tokens) / self.duration_s

    @property
    def goodput_per_s(self) -> float | None:
        """Requests a second that were within all objectives."""
        return None if self.good is None else self.good / self.duration_s

    @property
    def client_us_per_token(self) -> float:
        """Processor time of this client for each output token, in microseconds."""
        return 1e6 * self.client_cpu_s / max(1, self.output_tokens)

    def to_json(self) -> dict[str, Any]:
        """Plain data; latencies in milliseconds, null where nothing was measured."""
        content: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "total_cached_tokens": self.cached_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.requests_per_s,
            "request_goodput": self.goodput_per_s,
            "output_throughput": self.output_tokens_per_s,
            "total_token_throughput": self.total_tokens_per_s,
            "client_us_per_token": self.client_us_per_token,
            "errors": self.errors,
        }
        for name, summary in self.latencies.items():
            content[f"mean_{name}_ms"] = _ms(summary.mean)
            content[f"median_{name}_ms"] = _ms(summary.median)
            content[f"std_{name}_ms"] = _ms(summary.std)
            for p, value in summary.percentiles.items():
                content[f"p{p}_{name}_ms"] = _ms(value)
        return content


def summarise(
    recordings: Sequence[Recording],
    duration_s: float,
    objectives: Sequence[Objective] = (),
    client_cpu_s: float = 0.0,
) -> Result:
    """Puts the requests of a run together. Those that failed count as failed and nowhere else."""
    done = [r for r in recordings if r.succeeded]
    values: dict[str, list[float]] = {
        "ttft": [r.ttft for r in done],
        "tpot": [r.tpot for r in done if r.output_tokens > 1],
        "itl": [gap for r in done for gap in r.itl],
        "gap": [gap for r in done for gap in r.gaps],
        "e2el": [r.e2el for r in done],
    }
    good = sum(all(r.keeps(o) for o in objectives) for r in done) if objectives else None
    return Result(
        duration_s=duration_s,
        completed=len(done),
        failed=len(recordings) - len(done),
        input_tokens=sum(r.prompt_tokens for r in done),
        cached_tokens=sum(r.cached_tokens for r in done),
        output_tokens=sum(r.output_tokens for r in done),
        good=good,
        latencies={name: Summary.of(found) for name, found in values.items()},
        errors=dict(Counter(r.error for r in recordings if r.error).most_common()),
        client_cpu_s=client_cpu_s,
    )


def _ms(seconds: float) -> float | None:
    return None if seconds != seconds else 1000 * seconds
