"""Byte pair encoding by ranks of tokens, as the list of merges that the tokenizers library wants.

Standard library only.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T", bytes, str)


def merges(ranks: Mapping[T, int]) -> list[tuple[T, T]]:
    """The pairs that make each token, by the ranks of what they make.

    `ranks`: of all tokens, 0, 1, 2, ...; the first to be merged has the least. In a text the pair of the least rank is
    merged first, of equal ones the leftmost. So a token always comes about as it does alone: by one pair.
    """
    made: dict[T, tuple[T, T]] = {}
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        if len(known) > 1:
            earlier = [pair for pair in known if max(map(ranks.__getitem__, pair)) < ranks[token]]
            known = [pair for pair in earlier if _meet(*pair, ranks, made)] or [
                pair for pair in known if pair == _last_pair(token, ranks)
            ]
        if known:
            made[token] = known[0]
    return list(made.values())


def _meet(left: T, right: T, ranks: Mapping[T, int], made: Mapping[T, tuple[T, T]]) -> bool:
    """Whether the two tokens come about beside each other: no merge across their border comes before one within them.

    Takes the later merge of the two tokens back, again and again, and looks at what lies at the border then: a pair
    there that makes a token of less rank than the merge taken back would have been merged in its place.
    """
    limit = ranks[left + right]
    while True:
        if ranks.get(left + right, limit) < limit:
            return False
        on_the_left, on_the_right = made.get(left), made.get(right)
        if on_the_left is None and on_the_right is None:
            return True
        if on_the_right is None or (on_the_left is not None and ranks[left] > ranks[right]):
            assert on_the_left is not None
            limit, left = ranks[left], on_the_left[1]
        else:
            # Of equal ranks the left pair goes first.
            limit, right = ranks[right] + 1, on_the_right[0]


def _last_pair(token: T, ranks: Mapping[T, int]) -> tuple[T, T] | None:
    """What `_meet` finds, by merging a token's characters: slower, for any order of ranks. None if it is never made."""
    parts = [token[at : at + 1] for at in range(len(token))]
    worst = len(ranks)
    while len(parts) > 2:
        ranked = [ranks.get(left + right, worst) for left, right in pairwise(parts)]
        best = min(ranked)
        if best == worst:
            return None
        at = ranked.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1])
