"""What was lost and how long the pauses were, for people and for programs."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.kill.run import Outcome
from benchmarks.kill.settings import KillSettings
from benchmarks.kill.target import Strike
from benchmarks.kill.transcript import Transcript

_AFTER_S = 15.0  # a gap that begins later is not this kill's
_MOST_ERRORS = 5


@dataclass(frozen=True, slots=True)
class OfVictim:
    """All kills of one victim. Seconds; None where nothing was measured."""

    kills: int
    streams: int  # that were being read when it was hit
    gap_p50: float | None
    gap_p99: float | None
    wait_max: float | None  # for a first token, from the kill
    noticed_max: float | None
    missed_max: float | None
    whole_max: float | None
    bystanders: list[str]  # that crashed though they were not hit


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole run."""

    requests: int
    completed: int
    failed: int
    lost: int
    doubled: int
    equal: int
    tokens: int
    reconnects: int
    seconds: float
    undisturbed_gap_p99: float
    victims: dict[str, OfVictim]
    errors: dict[str, int]

    def problems(self, settings: KillSettings) -> list[str]:
        """Why the run has failed; empty if it has not."""
        found = []
        if self.failed:
            found.append(f"{self.failed} requests did not end as they should")
        if self.lost or self.doubled:
            found.append(f"{self.lost} tokens lost, {self.doubled} doubled")
        if settings.expect_equal and self.equal < self.completed:
            found.append(f"{self.completed - self.equal} answers differ from the undisturbed run")
        for name, victim in self.victims.items():
            if settings.most_gap and (victim.gap_p99 or 0.0) > settings.most_gap:
                found.append(f"{name}: P99 of gaps is {victim.gap_p99:.2f} s")
            if victim.bystanders:
                found.append(f"{name}: killed {', '.join(victim.bystanders)} as well")
        return found


def judge(outcome: Outcome) -> Verdict:
    """Adds everything up."""
    pairs = list(zip(outcome.reference, outcome.disturbed, strict=True))
    done = [(before, after) for before, after in pairs if not after.error]
    by_victim: dict[str, list[tuple[Strike, float]]] = {}
    for strike, following in zip(outcome.strikes, [*outcome.strikes[1:], None], strict=True):
        until = strike.at + _AFTER_S
        if following is not None:
            until = min(until, following.at)
        by_victim.setdefault(strike.victim.text, []).append((strike, until))
    calm = [b - a for t in outcome.reference for a, b in zip(t.times, t.times[1:], strict=False)]
    return Verdict(
        requests=len(pairs),
        completed=len(done),
        failed=len(pairs) - len(done),
        lost=sum(t.lost for t in outcome.disturbed),
        doubled=sum(t.doubled for t in outcome.disturbed),
        equal=sum(before.equals(after) for before, after in done),
        tokens=sum(len(c.tokens) for t in outcome.disturbed for c in t.choices),
        reconnects=outcome.reconnects,
        seconds=outcome.seconds,
        undisturbed_gap_p99=_rank(calm, 99) or 0.0,
        victims={name: _of(found, outcome.disturbed) for name, found in by_victim.items()},
        errors=dict(Counter(t.error for t in outcome.disturbed if t.error).most_common()),
    )


def _of(strikes: list[tuple[Strike, float]], transcripts: list[Transcript]) -> OfVictim:
    gaps = [t.gap_at(s.at, until) for s, until in strikes for t in transcripts]
    measured = [gap for gap in gaps if gap is not None]
    waits = [t.wait_at(s.at) for s, _ in strikes for t in transcripts]
    return OfVictim(
        kills=len(strikes),
        streams=len(measured),
        gap_p50=_rank(measured, 50),
        gap_p99=_rank(measured, 99),
        wait_max=_largest(waits),
        noticed_max=_largest([s.noticed_s for s, _ in strikes]),
        missed_max=_largest([s.missed_s for s, _ in strikes]),
        whole_max=_largest([s.whole_s for s, _ in strikes]),
        bystanders=[name for s, _ in strikes for name in s.bystanders],
    )


def table(verdict: Verdict, settings: KillSettings) -> str:
    """Lines for the terminal."""
    share = verdict.equal / max(1, verdict.completed)
    lines = [
        f"requests             {verdict.requests}",
        f"ended once, whole    {verdict.completed}",
        f"failed               {verdict.failed}",
        f"tokens               {verdict.tokens}, {verdict.lost} lost, {verdict.doubled} doubled",
        f"equal to undisturbed {verdict.equal} ({share:.1%})",
        f"reconnects           {verdict.reconnects}",
        f"duration             {verdict.seconds:.1f} s",
        f"gap without kills    P99 {verdict.undisturbed_gap_p99:.2f} s",
        "",
        f"{'victim':<20}{'kills':>6}{'streams':>9}{'gap P50':>9}{'gap P99':>9}{'first':>8}"
        f"{'noticed':>9}{'missed':>8}{'whole':>8}   seconds",
    ]
    for name, of in verdict.victims.items():
        cells = (of.wait_max, of.noticed_max, of.missed_max, of.whole_max)
        widths = (8, 9, 8, 8)
        lines.append(
            f"{name:<20}{of.kills:>6}{of.streams:>9}{_cell(of.gap_p50, 9)}{_cell(of.gap_p99, 9)}"
            + "".join(_cell(value, width) for value, width in zip(cells, widths, strict=True))
        )
    lines += ["", *(f"{n:>5} x {e}" for e, n in list(verdict.errors.items())[:_MOST_ERRORS])]
    problems = verdict.problems(settings)
    lines.append("; ".join(problems) if problems else "nothing lost, nothing doubled")
    return "\n".join(line for line in lines)


def to_json(verdict: Verdict, settings: KillSettings) -> str:
    """The same as data, with what was asked for."""
    told: dict[str, Any] = settings.model_dump(mode="json", exclude={"api_key", "output"})
    problems = verdict.problems(settings)
    return json.dumps({**asdict(verdict), "problems": problems, "settings": told}, indent=1) + "\n"


def _rank(values: list[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _largest(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return max(found) if found else None


def _cell(seconds: float | None, width: int) -> str:
    return f"{'-':>{width}}" if seconds is None else f"{seconds:>{width}.2f}"
