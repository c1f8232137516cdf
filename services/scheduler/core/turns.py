"""Who computes together. Nearly always all do. A sequence that may be what ends decoders runs alone for a while: its
request and all others take turns then, one plan at a time, so that it is known whose plan was not answered.
"""

from collections.abc import Iterable, Iterator

from services.scheduler.core.sequence import Policy, Sequence


class Turns:
    """Sequences are alone until they have `alone_until` tokens; their requests and all others take turns, round after
    round.
    """

    def __init__(self) -> None:
        self.first: Sequence | None = None  # of those that run alone, by rank
        self._alone: dict[Sequence, None] = {}
        self._requests: dict[str, None] = {}  # whose they are, by rank
        self._request: str | None = None  # whose turn it is; None is all others'

    def enter(self, sequence: Sequence) -> None:
        """A sequence that is new here."""
        if len(sequence.tokens) < sequence.alone_until:
            self._alone[sequence] = None

    def leave(self, sequence: Sequence) -> None:
        """It has ended."""
        self._alone.pop(sequence, None)

    @property
    def is_of_others(self) -> bool:
        """Whether it is the turn of those that do not run alone."""
        return self._request is None

    def are_taken(self) -> bool:
        """Whether somebody runs alone: then a plan waits for the answer to the one before it."""
        if self._alone:  # nearly never
            self._alone = {s: None for s in self._alone if len(s.tokens) < s.alone_until}
        return bool(self._alone)

    def order(self, policy: Policy) -> Iterator[None]:
        """Gives the turn to one after the other, for as long as the caller finds nothing to compute."""
        by_rank = sorted(self._alone, key=policy)
        self.first = by_rank[0] if by_rank else None
        self._requests = dict.fromkeys(s.request_id for s in by_rank)
        turns: list[str | None] = [None, *self._requests]
        # After whose turn it was: one that is long alone keeps nobody waiting until its end.
        next_ = turns.index(self._request) + 1 if self._request in turns else 0
        for self._request in turns[next_:] + turns[:next_]:
            yield

    def among(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those whose turn it is."""
        if not self._requests:
            return list(sequences)
        if self._request is not None:
            return [s for s in sequences if s.request_id == self._request]
        return [s for s in sequences if s.request_id not in self._requests]
