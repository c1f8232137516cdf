"""Beam search as Hugging Face transformers does it (`GenerationMixin._beam_search`): the choice of beams alone.

Scores are sums of log-probabilities; that of a finished hypothesis is divided by its number of generated tokens, the
stop token counted, to the power of the length penalty. A beam is whatever object its owner computes it with: here it
only has to be hashable.

Where more of the best continuations end with a stop string than leave beams to go on, transformers goes on with ended
ones at a score of -1e9. Here they are dropped: while one beam is alive all of its continuations are better, and when
none is, there are as many finished hypotheses as beams.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Beam = TypeVar("Beam", bound=Hashable)
Top = list[tuple[int, float]]  # token ids and log-probabilities, descending


class Step(NamedTuple):
    """One token of a hypothesis and all before it, shared by the beams that grew from it."""

    before: "Step | None"
    token: int
    logprob: float
    top: Top  # what else could have come here


class Hypothesis(NamedTuple):
    """A finished output."""

    score: float
    last: Step
    stop_token_id: int | None
    has_stop_string: bool  # neither: it reached the most tokens that it may have

    def steps(self) -> list[Step]:
        """Its tokens in order."""
        found: list[Step] = []
        step: Step | None = self.last
        while step is not None:
            found.append(step)
            step = step.before
        return found[::-1]


class Continuation(NamedTuple, Generic[Beam]):
    """A live beam of the next step: which beam it grows from, and its new token."""

    parent: Beam
    step: Step
    score: float


@dataclass(slots=True, eq=False)
class BeamSearch(Generic[Beam]):
    """One request's search. Each of its beams is answered once for every token."""

    num_beams: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    exhaustive: bool = False  # goes on while a hypothesis of the greatest length could be better
    completes_stop_string: Callable[[Step], bool] | None = None  # of the last token of a beam
    num_kept_top: int = 0  # of what else could have come, how much is kept for the caller

    live: list[Beam] = field(default_factory=list)
    spare_slots: list[int] = field(default_factory=list)
    finished: list[Hypothesis] = field(default_factory=list)  # at most num_beams, best first
    done: bool = False
    _answers: dict[Beam, Top] = field(default_factory=dict)
    _steps: dict[Beam, Step] = field(default_factory=dict)
    _scores: dict[Beam, float] = field(default_factory=dict)
    _generated: int = 0

    @property
    def num_top(self) -> int:
        """How many log-probabilities each beam must be answered with.

        So many that, even if every stop id is among them and too early, enough other tokens are left.
        """
        stops = len(self.stop_token_ids)
        return max(2, 1 + stops) * self.num_beams + stops

    def answer(self, beam: Beam, top: Top) -> None:
        """The decoder's answer for one beam."""
        self._answers[beam] = top

    def forget_answer(self, beam: Beam) -> None:
        """A beam is computed again."""
        self._answers.pop(beam, None)

    @property
    def is_answered(self) -> bool:
        """Every live beam has its answer."""
        return all(beam in self._answers for beam in self.live)

    def advance(self) -> list[Continuation[Beam]]:
        """Decides a step. Returns the beams that live on, best first; none when the search is done."""
        keep = max(2, 1 + len(self.stop_token_ids)) * self.num_beams
        candidates = sorted(self._candidates(), key=lambda c: -c.score)[:keep]
        self._generated += 1
        ended = [self._hypothesis(c) for c in candidates]
        # Only the best num_beams may finish: the others are there to go on with if those all do.
        fresh = [h for h in ended[: self.num_beams] if h is not None]
        self.finished = sorted(self.finished + fresh, key=lambda h: -h.score)[: self.num_beams]
        going_on = [c for c, end in zip(candidates, ended, strict=True) if end is None]
        going_on = going_on[: self.num_beams]
        self.done = not going_on or self._cannot_improve(going_on[0].score)
        self._answers.clear()
        return [] if self.done else going_on

    def assign(self, beams: Iterable[tuple[Beam, Continuation[Beam]]]) -> None:
        """Which sequence carries on which beam."""
        pairs = list(beams)
        self.live = [beam for beam, _ in pairs]
        self._steps = {beam: c.step for beam, c in pairs}
        self._scores = {beam: c.score for beam, c in pairs}

    def clear(self) -> None:
        """Drops its beams, which refer to it."""
        self.live = []
        self._answers, self._steps, self._scores = {}, {}, {}

    def _candidates(self) -> list[Continuation[Beam]]:
        found = []
        too_early = self._generated + 1 < self.min_tokens
        for beam in self.live:
            top, before, score = (
                self._answers[beam],
                self._steps.get(beam),
                self._scores.get(beam, 0.0),
            )
            kept = top[: self.num_kept_top]
            for token, logprob in top:
                if not (too_early and token in self.stop_token_ids):
                    step = Step(before, token, logprob, kept)
                    found.append(Continuation(beam, step, score + logprob))
        return found

    def _hypothesis(self, candidate: Continuation[Beam]) -> Hypothesis | None:
        token = candidate.step.token
        stop = token if token in self.stop_token_ids else None
        has_string = stop is None and self._completes_stop_string(candidate.step)
        if stop is None and not has_string and self._generated < self.max_tokens:
            return None
        score = candidate.score / self._generated**self.length_penalty
        return Hypothesis(score, candidate.step, stop, has_string)

    def _completes_stop_string(self, step: Step) -> bool:
        return self.completes_stop_string is not None and self.completes_stop_string(step)

    def _cannot_improve(self, best_running: float) -> bool:
        if len(self.finished) < self.num_beams:
            return False
        if self.early_stopping:
            return True
        longest = self._generated
        if self.exhaustive and self.length_penalty > 0:
            longest = self.max_tokens
        best_possible: float = best_running / longest**self.length_penalty
        return best_possible <= self.finished[-1].score
