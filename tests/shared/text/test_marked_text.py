"""Text with markers in it is the text without them, and stop strings are found and cut as they are there."""

import random

import pytest

from shared.text.marked_text import MarkedText
from shared.text.stop_search import StopStrings
from shared.text.text_fold import StopFinder, TextFold, TokenBytes

PIECES = [b"a", b"b", b" ", "ł".encode(), "天".encode()[:1], "天".encode()[1:], b"<m>", b"<n>"]
SPECIAL = len(PIECES) - 1  # "<n>": shown only without skipping
TABLE = TokenBytes(PIECES, special_ids=[SPECIAL])
FIRST, SECOND = map(chr, (0xD800, 0xD801))
MARKS = {6: FIRST, SPECIAL: SECOND}
STOPS = (None, ["ab"], ["m>a", "b <"], [">", "a<m>b"], ["天"])


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_markers_take_the_place_of_their_text(skips: bool, stops: list[str] | None) -> None:
    shown = {FIRST: "<m>", SECOND: "" if skips else "<n>"}
    for seed in range(200):
        draw = random.Random(seed)
        tokens = [draw.randrange(len(PIECES)) for _ in range(draw.randint(1, 12))]
        found = StopStrings(stops) if stops else None
        finder = StopFinder(TABLE, found, skip_special_tokens=skips) if found else None
        plain = TextFold(TABLE, skips, found)
        marked = MarkedText(TABLE, skips, found, False, MARKS)
        texts, marks, cut = "", "", 0
        for token in tokens:
            texts += plain.push(token)
            marks += marked.push(token)
            assert marked.held_bytes == plain.held_bytes
            match = finder.push(token) if finder else None
            if match is not None:
                cut = match.cut_bytes
                break
        texts += plain.finish(cut)
        marks += marked.finish(cut)
        for mark, text in shown.items():
            marks = marks.replace(mark, text)
        # Half a character before a marker is replaced at once, which decoding it all does too.
        assert marks == texts, (tokens, stops)


def test_a_marker_comes_where_its_token_stands() -> None:
    marked = MarkedText(TABLE, True, StopStrings(["b<"]), False, MARKS)
    assert [marked.push(token) for token in (0, 1, 6, 1)] == ["a", "", "", ""]
    # "b<" is found: what it takes of the marker is text.
    assert marked.finish(cut=5) == ""
    marked = MarkedText(TABLE, True, StopStrings(["bb"]), False, MARKS)
    given = [marked.push(token) for token in (0, 1, SPECIAL, 6, 1)]
    assert given == ["a", "", "", f"b{SECOND}{FIRST}", ""]
    assert marked.finish() == "b"
