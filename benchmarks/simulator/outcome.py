"""What came of a run: latencies and use in virtual time, and what deciding cost in real time."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.simulator.costs import RequestCosts, StepCosts
from benchmarks.simulator.shard import ShardOutcome


@dataclass(frozen=True)
class Outcome:
    """All shards together."""

    shards: list[ShardOutcome]
    wall_s: float

    def total(self, name: str) -> float:
        """A count or time, summed over shards."""
        return float(sum(getattr(shard, name) for shard in self.shards))

    @property
    def virtual_s(self) -> float:
        """When the last request ended."""
        return max(shard.ended_at for shard in self.shards)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.total("cached_tokens") / max(1.0, self.total("prompt_tokens"))

    @property
    def utilisations(self) -> "np.ndarray[Any, Any]":
        """Share of the time that each decoder was computing."""
        busy = np.concatenate([np.asarray(shard.busy_s) for shard in self.shards])
        return busy / max(1e-9, self.virtual_s)

    @property
    def step_costs(self) -> StepCosts:
        """What plan() and complete() took."""
        costs = StepCosts()
        for shard in self.shards:
            costs.extend(shard.step_costs)
        return costs

    @property
    def request_costs(self) -> RequestCosts:
        """What taking in a request took."""
        costs = RequestCosts()
        for shard in self.shards:
            costs.extend(shard.request_costs)
        return costs

    @property
    def leaks(self) -> list[str]:
        """What was left behind when all requests had ended."""
        return [leak for shard in self.shards for leak in shard.leaks]

    @property
    def lost(self) -> int:
        """Requests that neither ended nor were refused."""
        ended = sum(len(shard.ttft) for shard in self.shards)
        return int(self.total("requests") - self.total("refused")) - ended

    def latency(self, name: str) -> "np.ndarray[Any, Any]":
        """`ttft` or `tpot` of every request, in seconds."""
        return np.concatenate([np.asarray(getattr(shard, name)) for shard in self.shards])

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in milliseconds where the name says so."""
        deciding, entering = self.step_costs, self.request_costs.us()
        decision_us = deciding.us_of_row()
        content: dict[str, Any] = {
            "requests": int(self.total("requests")),
            "refused": int(self.total("refused")),
            "wall_s": self.wall_s,
            "virtual_s": self.virtual_s,
            "hit_rate": self.hit_rate,
            "output_tokens_per_s": self.total("output_tokens") / self.virtual_s,
            "utilisation_mean": float(self.utilisations.mean()),
            "utilisation_least": float(self.utilisations.min()),
            "utilisation_most": float(self.utilisations.max()),
            "preemptions": int(self.total("preemptions")),
            "encodes": int(self.total("encodes")),
            "encoder_hits": int(self.total("encoder_hits")),
            "steps": int(self.total("steps")),
            "sequence_steps": int(self.total("sequence_steps")),
            "decision_us": decision_us,
            "decision_parts_us": deciding.us(),
            "request_us": entering,
            "cpu_s": self.total("cpu_s"),
            "cpu_deciding_s": 1e-6 * decision_us * self.total("sequence_steps"),
            "cpu_entering_s": 1e-6 * sum(entering.values()) * self.total("requests"),
            "memory_mb": self.total("memory_mb"),
            "lost": self.lost,
            "leaks": self.leaks,
        }
        for name in ("ttft", "tpot"):
            values = 1000 * self.latency(name)
            content[f"mean_{name}_ms"] = float(values.mean())
            for label, rank in (("median", 50), ("p90", 90), ("p99", 99)):
                content[f"{label}_{name}_ms"] = float(np.percentile(values, rank))
        return content

    def table(self) -> str:
        """Lines for the terminal."""
        c = self.to_json()
        parts, request = c["decision_parts_us"], c["request_us"]
        rows = [
            ("requests", f"{c['requests']:,} in {c['virtual_s']:.1f} s of virtual time"),
            ("simulated in", f"{c['wall_s']:.1f} s"),
            ("output tokens/s", f"{c['output_tokens_per_s']:,.0f}"),
            *(
                (
                    f"{name.upper()}, ms",
                    f"mean {c[f'mean_{name}_ms']:.1f}, median {c[f'median_{name}_ms']:.1f}, "
                    f"P90 {c[f'p90_{name}_ms']:.1f}, P99 {c[f'p99_{name}_ms']:.1f}",
                )
                for name in ("ttft", "tpot")
            ),
            (
                "utilisation",
                f"mean {c['utilisation_mean']:.1%}, least {c['utilisation_least']:.1%}, "
                f"most {c['utilisation_most']:.1%}",
            ),
            ("prefix hit rate", f"{c['hit_rate']:.1%} of prompt tokens"),
            ("preemptions", f"{c['preemptions']:,}"),
            ("sequence-steps", f"{c['sequence_steps']:,} in {c['steps']:,} steps"),
            ("a decision", f"{c['decision_us']:.2f} us for each sequence-step (goal: 1.5)"),
            ("  made of", ", ".join(f"{us:.2f} us {name}" for name, us in parts.items())),
            (
                "a request",
                f"{request['routing']:.1f} us routing (goal: 10), {request['hashing']:.1f} us hashing, "
                f"{request['adding']:.1f} us adding",
            ),
            (
                "processor time",
                f"{c['cpu_s']:.1f} s: {c['cpu_deciding_s']:.1f} s deciding, {c['cpu_entering_s']:.1f} s taking "
                "requests in, the rest simulating",
            ),
            ("memory", f"{c['memory_mb']:,.0f} MB in all shards"),
        ]
        if c["encodes"]:
            rows.append(("pictures", f"{c['encodes']:,} encoded, {c['encoder_hits']:,} cached"))
        if self.lost:
            rows.append(("LOST", f"{self.lost:,} requests"))
        rows += [("LEFT BEHIND", leak) for leak in self.leaks[:10]]
        return "\n".join(f"{name:<18} {value}" for name, value in rows)
