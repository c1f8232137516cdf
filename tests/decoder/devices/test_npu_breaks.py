"""Ways to break the code for NPUs (tests/ascend/breaks) are ways to break what is there."""

from collections import Counter

import pytest

from tests.ascend.breaks.entries import BREAKS
from tests.ascend.breaks.fault import ROOT, Break


def test_every_text_that_is_exchanged_is_there_once() -> None:
    for entry in BREAKS:
        text = (ROOT / entry.file).read_text(encoding="utf-8")
        broken = entry.broken(text)  # raises ValueError for another text
        compile(broken, entry.file, "exec")
        assert entry.old != entry.new


def test_every_reason_has_tests_that_are_there() -> None:
    assert [
        reason for reason, count in Counter(e.reason for e in BREAKS).items() if count > 1
    ] == []
    for entry in BREAKS:
        for test in entry.tests:
            file, _, name = test.partition("::")
            text = (ROOT / "tests/ascend" / file).read_text(encoding="utf-8")
            assert f"def {name.partition('[')[0]}" in text, entry.reason


@pytest.mark.parametrize("old", ["is gone", "twice"])
def test_a_text_that_is_not_there_once_is_an_error(old: str) -> None:
    with pytest.raises(ValueError, match=r"of the mask: a/b\.py has .* times, not once"):
        Break("of the mask", "a/b.py", old, "", ()).broken("twice twice")
