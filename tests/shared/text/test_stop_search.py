"""Stop strings in a growing output, against their definition: the whole output is searched after each piece."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text.stop_search import StopSearch, StopStrings

# Letters that repeat, so that stop strings overlap themselves and each other, and characters of several bytes.
ALPHABETS = ["ab", "aé", "圆红😀", "abé😀"]


class Definition:
    """What `StopSearch` is to do, by searching everything again for each piece."""

    def __init__(self, stops: list[str]) -> None:
        self.stops = [stop.encode() for stop in stops]
        self.output = b""
        self.given = 0
        self.begin: int | None = None

    def push(self, data: bytes) -> tuple[bytes, str | None, bytes]:
        """The bytes that are certain, the stop string, and what is held."""
        self.output += data
        if self.begin is None:
            places = [self.output.find(stop) for stop in self.stops]
            self.begin = min((at for at in places if at >= 0), default=None)
        if self.begin is not None:
            certain = self.begin
            here = (s for s in self.stops if self.output.startswith(s, self.begin))
            found = next(here).decode()
        else:
            found = None
            ends = range(len(self.output) + 1)
            certain = next(at for at in ends if self._may_begin_one(self.output[at:]))
        fresh, self.given = self.output[self.given : certain], certain
        return fresh, found, self.output[certain:]

    def _may_begin_one(self, end: bytes) -> bool:
        return any(len(end) < len(stop) and stop.startswith(end) for stop in self.stops)


def pieces_of(data: bytes, rng: random.Random) -> list[bytes]:
    """The bytes as tokens are: of one byte to six, which split characters."""
    pieces = []
    while data:
        size = rng.choice([1, 1, 2, 3, 6])
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@given(data=st.data())
def test_every_choice_finds_what_the_definition_finds(data: st.DataObject) -> None:
    letters = st.text(data.draw(st.sampled_from(ALPHABETS)), min_size=1, max_size=9)
    stops = data.draw(st.lists(letters, min_size=1, max_size=5))
    rng = data.draw(st.randoms(use_true_random=False))
    shared = StopStrings(stops)
    choices = [(StopSearch(shared), Definition(stops)) for _ in range(3)]
    texts = data.draw(st.lists(st.lists(letters, max_size=8).map("".join), min_size=3, max_size=3))
    pieces = [
        (number, piece)
        for number, text in enumerate(texts)
        for piece in pieces_of(text.encode(), rng)
    ]
    # Each choice's pieces stay in order, between those of the others.
    order = [number for number, _ in pieces]
    rng.shuffle(order)
    waiting = [[piece for number, piece in pieces if number == one] for one in range(3)]
    for number in order:
        piece = waiting[number].pop(0)
        search, definition = choices[number]
        assert (*search.push(piece), bytes(search.held)) == definition.push(piece)


@pytest.mark.parametrize("stop", ["ab" * 300 + "c", "a" * 500 + "b", "aab" * 200 + "aac"])
def test_long_stop_strings_that_repeat_themselves(stop: str) -> None:
    rng = random.Random(0)
    for _ in range(10):
        parts = [stop[: rng.randrange(len(stop))] for _ in range(rng.randrange(4))]
        output = "".join(parts) + rng.choice(["", stop]) + "abc"
        search, definition = StopSearch(StopStrings([stop])), Definition([stop])
        for piece in pieces_of(output.encode(), rng):
            assert (*search.push(piece), bytes(search.held)) == definition.push(piece)


def test_after_a_match_a_longer_one_at_its_place_and_before_it_in_the_list_counts() -> None:
    """As where `min_tokens` lets an answer go on."""
    search = StopSearch(StopStrings(["abcd", "bc", "ab"]))
    assert search.push(b"xab") == (b"x", "ab")
    assert search.push(b"c") == (b"", "ab")
    assert search.push(b"de") == (b"", "abcd")
    assert search.push(b"bc") == (b"", "abcd")
    assert search.held == b"abcdebc"


def test_the_largest_stop_strings_take_a_few_bytes_for_each_of_theirs() -> None:
    rng = random.Random(1)
    stops = ["".join(chr(rng.randrange(0x1F300, 0x1F5FF)) for _ in range(1024)) for _ in range(16)]
    size = sum(len(stop.encode()) for stop in stops)
    tracemalloc.start()
    try:
        shared = StopStrings(stops)
        searches = [StopSearch(shared) for _ in range(4)]
        for search, stop in zip(searches, stops, strict=False):  # nearly through, and a mismatch
            for piece in pieces_of(stop.encode()[:-1] + b" ", rng):
                assert search.push(piece)[1] is None
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 8 * size, f"{held} bytes for {size} bytes of stop strings"
    assert [search.held for search in searches] == [b""] * 4
