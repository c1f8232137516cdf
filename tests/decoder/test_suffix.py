"""Guesses by repetition."""

import numpy as np
import pytest

from services.decoder.speculation.modes import make_proposer
from services.decoder.speculation.suffix import SuffixProposer

SCOPE = b"who shares"


def guess(proposer: SuffixProposer, tokens: list[int], most: int = 3, slot: int = 0) -> list[int]:
    return proposer.propose(slot, np.array(tokens, np.int32), most)


@pytest.fixture
def proposer() -> SuffixProposer:
    found = SuffixProposer()
    found.begin(0, SCOPE)
    return found


def test_what_followed_the_same_tokens_follows(proposer: SuffixProposer) -> None:
    assert guess(proposer, [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4]) == [5, 6, 7]
    assert guess(proposer, [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 8]) == []


def test_the_more_agrees_the_more_is_guessed(proposer: SuffixProposer) -> None:
    assert guess(proposer, [1, 2, 3, 4, 9, 8, 1]) == []
    assert guess(proposer, [1, 2, 3, 4, 9, 8, 1, 2]) == [3]
    assert guess(proposer, [1, 2, 3, 4, 9, 8, 1, 2, 3]) == [4, 9, 8]


def test_what_was_often_wrong_is_not_guessed_until_it_is_right_again(
    proposer: SuffixProposer,
) -> None:
    """A pair that is followed by another token each time, and from then on by the same one."""
    tokens: list[int] = []
    guesses = 0
    for number in range(20):
        tokens += [1, 2]
        guesses += bool(guess(proposer, tokens, most=1))
        tokens.append(100 + number)
        assert guess(proposer, tokens, most=1) == []
    assert guesses <= 3
    for _ in range(20):
        tokens += [1, 2]
        found = guess(proposer, tokens, most=1)
        tokens += [7, 100 + len(tokens)]
        guess(proposer, tokens, most=1)
    assert found == [7]


def test_the_longest_end_counts_and_then_the_latest(proposer: SuffixProposer) -> None:
    tokens = [7, 1, 2, 5, 0, 8, 1, 2, 6, 0, 9, 1, 2, 4, 0, 8, 1, 2]
    assert guess(proposer, tokens, most=1) == [6]
    proposer.begin(1, SCOPE)
    assert guess(proposer, [1, 2, 5, 0, 1, 2, 6, 0, 0, 3, 1, 2], most=1, slot=1) == [6]


def test_a_loop_is_gone_round(proposer: SuffixProposer) -> None:
    assert guess(proposer, [5] * 9, most=4) == [5] * 4
    proposer.begin(0, SCOPE)
    assert guess(proposer, [1, 2] * 6, most=5) == [1, 2, 1, 2, 1]


def test_tokens_that_come_one_by_one_are_found_as_all_at_once(proposer: SuffixProposer) -> None:
    tokens = np.random.default_rng(5).integers(0, 4, 700).tolist()
    compared = 0
    for end in range(1, len(tokens)):
        found = guess(proposer, tokens[:end])
        proposer.begin(1, SCOPE)  # it knows nothing of how often what was found was right
        at_once = guess(proposer, tokens[:end], slot=1)
        both = min(len(found), len(at_once))
        assert found[:both] == at_once[:both]
        compared += both
    assert compared > 100


def test_earlier_answers_are_found_by_those_alone_who_share(proposer: SuffixProposer) -> None:
    answer = np.arange(100, 140, dtype=np.int32)
    proposer.end(0, answer)
    for slot, scope in ((1, SCOPE), (2, b"another"), (3, b"")):
        proposer.begin(slot, scope)
        found = guess(proposer, [7, 110, 111, 112, 113], slot=slot)
        assert found == ([114, 115, 116] if scope == SCOPE else [])
    assert guess(proposer, [7, 137, 138, 139], slot=1) == []  # nothing came after it
    proposer.end(2, answer)
    proposer.end(3, answer)
    proposer.begin(3, b"")
    assert guess(proposer, [7, 110, 111, 112, 113], slot=3) == []


def test_what_is_kept_is_bounded(proposer: SuffixProposer) -> None:
    rng = np.random.default_rng(3)
    first = rng.integers(0, 1 << 17, 9_000).astype(np.int32)
    for answer in (first, *[rng.integers(0, 1 << 17, 9_000).astype(np.int32) for _ in range(2)]):
        proposer.begin(0, SCOPE)
        proposer.end(0, answer)
        proposer.begin(0, SCOPE)
        assert guess(proposer, answer[100:110].tolist()) == answer[110:113].tolist()
    assert guess(proposer, first[100:110].tolist()) == []
    for number in range(100):
        proposer.begin(0, number.to_bytes(2, "little"))
        proposer.end(0, first)
    proposer.begin(0, SCOPE)
    assert guess(proposer, answer[100:110].tolist()) == []


def test_drafts_are_to_be_asked_for_where_rows_are_not_equal() -> None:
    assert make_proposer("auto", equal_rows=True) is not None
    assert make_proposer("auto", equal_rows=False) is None
    assert make_proposer("suffix", equal_rows=False) is not None
    assert make_proposer("off", equal_rows=True) is None
