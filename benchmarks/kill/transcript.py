"""What a client got of one stream, and what was wrong with it."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shared.client import Event


@dataclass(slots=True)
class Choice:
    """Tokens and text of one choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    endings: list[str] = field(default_factory=list)


@dataclass
class Transcript:
    """One request. Times are seconds on `time.perf_counter`."""

    sent: float
    choices: list[Choice]
    times: list[float] = field(default_factory=list)  # of events with tokens
    ended: float = 0.0
    usage: int | None = None  # tokens by the server's count
    lost: int = 0
    doubled: int = 0
    error: str = ""

    def take(self, event: Event) -> None:
        """Adds an event; counts tokens that are missing or doubled by its id."""
        usage = event.data.get("usage")
        if usage:
            self.usage = int(usage["completion_tokens"])
        counts = _counts(event.id)
        for told in event.data.get("choices", ()):
            choice = self.choices[told["index"]]
            ids = told.get("token_ids") or []
            choice.tokens += ids
            choice.text += _text(told)
            if told.get("finish_reason"):
                choice.endings.append(told["finish_reason"])
            if ids:
                self.times.append(event.at)
            self._compare(choice, counts, told["index"])

    def _compare(self, choice: Choice, counts: list[int], index: int) -> None:
        """The id of an event says how many tokens its client has by now."""
        if index >= len(counts):
            return
        surplus = len(choice.tokens) - counts[index]
        if surplus > 0:
            self.doubled += surplus
            del choice.tokens[-surplus:]
        elif surplus < 0:
            self.lost -= surplus
            choice.tokens += [-1] * -surplus  # so that one gap is counted once

    def end(self, now: float) -> None:
        """Called when the stream is over: every choice must have one ending, and usage must agree."""
        self.ended = now
        if self.error:
            return
        endings = [len(choice.endings) for choice in self.choices]
        if set(endings) != {1}:
            self.error = f"choices ended {endings} times"
            return
        told = sum(len(choice.tokens) for choice in self.choices)
        if self.usage is not None and self.usage > told:
            self.lost += self.usage - told
        elif self.usage is not None:
            self.doubled += told - self.usage

    def equals(self, other: "Transcript") -> bool:
        """Whether tokens, text and endings are the same."""
        return self.choices == other.choices

    def gap_at(self, moment: float, until: float) -> float | None:
        """The longest time without a token that a kill at `moment` may have made: around it, or after it and over
        before `until`, the next kill. None for a stream that had not begun by then, or was over.
        """
        if not self.times or self.times[0] > moment or self.times[-1] <= moment:
            return None
        touching = [
            later - before
            for before, later in pairwise(self.times)
            if before <= moment < later or moment < before < later <= until
        ]
        return max(touching)

    def wait_at(self, moment: float) -> float | None:
        """From a moment to the first token, for a stream that was waiting for it; else None."""
        if not self.times or not self.sent <= moment < self.times[0]:
            return None
        return self.times[0] - moment


def _counts(event_id: str) -> list[int]:
    """Tokens of each choice at an event: `r_ab/9.12e` is [9, 12]; empty before any token."""
    place = event_id.rpartition("/")[2]
    if not place or place.startswith("h"):
        return []
    return [int(part.rstrip("ef")) for part in place.split(".")]


def _text(choice: dict[str, Any]) -> str:
    """What a choice says, reasoning and calls included."""
    delta = choice.get("delta", {})
    functions = [call.get("function", {}) for call in delta.get("tool_calls", ())]
    called = "".join(f"{one.get('name', '')}{one.get('arguments', '')}" for one in functions)
    said = choice.get("text") or delta.get("content") or ""
    return f"{delta.get('reasoning', '')}{said}{called}"
