"""What the code of some models does to a reply's text before it shows it, as pure folds over the pieces of the text.

Each step holds back what the next piece may change: after the same pieces any replica has given out the same text, and
the whole is what the model's own code makes of the whole reply. Standard library only.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

# The names of the steps, in requests and in records of families.
STRIP = "strip"  # no white space at either end
TRAINING_DATE = "training_date"  # what stood for a date in training
# , ! : ; ? beside a Chinese character become those of Chinese text.
WIDE_PUNCTUATION = "wide_punctuation"

_DATE, _YEAR = "[[训练时间]]", "2023年"
_WIDE = dict(zip(",!:;?", "，！：；？", strict=True))  # noqa: RUF001


class _Step(Protocol):
    def push(self, text: str) -> str:
        """Takes the next piece, and returns what is certain now."""

    def finish(self) -> str:
        """What is left at the end."""


class ReplyCleaner:
    """Steps one after the other."""

    def __init__(self, names: Sequence[str]) -> None:
        """Raises KeyError for a name of no step."""
        self._steps: list[_Step] = [_STEPS[name]() for name in names]

    def push(self, text: str) -> str:
        """Takes the next piece of a reply, and returns the text that is certain now."""
        for step in self._steps:
            text = step.push(text)
        return text

    def finish(self, text: str = "") -> str:
        """Takes the last piece, and returns the rest of the text."""
        for step in self._steps:
            text = step.push(text) + step.finish()
        return text


class _Strip:
    def __init__(self) -> None:
        self._began = False
        self._held = ""

    def push(self, text: str) -> str:
        if not self._began:
            text = text.lstrip()
            self._began = bool(text)
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown

    def finish(self) -> str:
        return ""


class _TrainingDate:
    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        text = (self._held + text).replace(_DATE, _YEAR)
        sizes = range(min(len(_DATE) - 1, len(text)), 0, -1)
        held = next((size for size in sizes if text.endswith(_DATE[:size])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        return self._held


class _WidePunctuation:
    def __init__(self) -> None:
        self._before = ""
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        if not text:
            return ""
        shown = [
            self._shown(character, self._before if at == 0 else text[at - 1], text[at + 1])
            for at, character in enumerate(text[:-1])
        ]
        self._before = text[-2] if len(text) > 1 else self._before
        # Of the last one it is known what is before it.
        if text[-1] in _WIDE and not _is_chinese(self._before):
            self._held = text[-1]
        else:
            shown.append(self._shown(text[-1], self._before, ""))
            self._before, self._held = text[-1], ""
        return "".join(shown)

    @staticmethod
    def _shown(character: str, before: str, behind: str) -> str:
        if character in _WIDE and (_is_chinese(before) or _is_chinese(behind)):
            return _WIDE[character]
        return character

    def finish(self) -> str:
        return self._held


def _is_chinese(character: str) -> bool:
    return "\u4e00" <= character <= "\u9fff"


_STEPS: dict[str, Callable[[], _Step]] = {
    STRIP: _Strip,
    TRAINING_DATE: _TrainingDate,
    WIDE_PUNCTUATION: _WidePunctuation,
}
