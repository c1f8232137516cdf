"""The bar of several prompts."""

import io
import sys

import pytest

from services.launcher.offline.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("total", "wanted", "kind", "shown"),
    [
        (2, True, Terminal, True),
        (2, False, Terminal, False),
        (1, True, Terminal, False),
        (2, True, io.StringIO, False),
    ],
)
def test_it_is_shown_on_a_terminal_for_several_prompts(
    total: int, wanted: bool, kind: type[io.StringIO], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(total, wanted=wanted) as answered:
        for _ in range(total):
            answered()
    assert ("2/2" in stream.getvalue()) == shown
    assert shown or not stream.getvalue()
