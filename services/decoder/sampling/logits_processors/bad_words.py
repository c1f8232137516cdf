"""Sequences of ids that an output never contains: the last id is forbidden once the others stand."""

from collections import deque
from collections.abc import Iterable, Sequence


class BadWords:
    """The words of one sequence with several tokens, and as much of its output as they look back."""

    def __init__(self, words: Iterable[Sequence[int]], output: Sequence[int]) -> None:
        """Words of at least two ids."""
        # By the id that is to be forbidden's predecessor, which is compared first.
        self._words: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        longest = 1
        for word in words:
            *before, last = word
            self._words.setdefault(before[-1], []).append((tuple(before), last))
            longest = max(longest, len(before))
        self._recent = deque(output, maxlen=longest)

    def __bool__(self) -> bool:
        return bool(self._words)

    def fork(self) -> "BadWords":
        """The same with an output of its own."""
        child = object.__new__(BadWords)
        child._words, child._recent = self._words, self._recent.copy()
        return child

    def commit(self, token: int) -> None:
        """Takes a sampled token."""
        self._recent.append(token)

    def forbidden(self) -> list[int]:
        """The ids that would complete a word now."""
        if not self._recent:
            return []
        candidates = self._words.get(self._recent[-1], ())
        recent = tuple(self._recent) if candidates else ()
        return [last for before, last in candidates if recent[-len(before) :] == before]
