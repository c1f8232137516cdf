"""Markers that are added tokens of a tokenizer. In the text that a fold reads each of them is one character that no
decoded text can hold, a lone surrogate: a text that only spells a marker is none.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from shared.output_format.table import OutputFormat, ReasoningFormat, Xml

_FIRST = 0xD800
# Fields of rows that hold markers.
_MARKERS = frozenset(field.name for row in (ReasoningFormat, Xml) for field in fields(row)) | {
    "around",
    "name_end",
    "name_prefix",
    "tail",
    "xml",
}
_MARKERS -= {"name", "breaks"}
MARK = re.compile("[\ud800-\udfff]")

_Row = TypeVar("_Row", OutputFormat, ReasoningFormat, Xml)


class TokenMarkers:
    """The marker tokens of one model and its forms. `chars` has the character of each token's id."""

    def __init__(self, added: Mapping[str, int], markers: Iterable[str]) -> None:
        """`added`: the ids of the tokenizer's added tokens by their text; `markers` are those of the forms in use."""
        texts = sorted(
            text for text in added if len(text) > 1 and any(text in marker for marker in markers)
        )
        self._by_text = {text: chr(_FIRST + index) for index, text in enumerate(texts)}
        self._texts = {char: text for text, char in self._by_text.items()}
        self.chars: Mapping[int, str] = {added[text]: char for text, char in self._by_text.items()}
        longest_first = sorted(map(re.escape, texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first)) if texts else None

    def within(self, marker: str) -> str:
        """A marker's text with the tokens in it as characters."""
        if self._pattern is None:
            return marker
        return self._pattern.sub(lambda found: self._by_text[found[0]], marker)

    def row(self, row: _Row) -> _Row:
        """The same row, its markers as they come in the text of a fold."""
        changed: dict[str, Any] = {}
        for field in fields(row):
            value = getattr(row, field.name)
            if field.name not in _MARKERS:
                continue
            if isinstance(value, str):
                changed[field.name] = self.within(value)
            elif isinstance(value, Xml):
                changed[field.name] = self.row(value)
            elif isinstance(value, tuple):
                changed[field.name] = tuple(map(self.within, value))
        return replace(row, **changed)

    def shown(self, text: str, hidden: Iterable[str] = ()) -> str:
        """A text of a fold as it is shown, where it turned out to be no call: without the tokens `hidden`."""
        if not MARK.search(text):
            return text
        left_out = frozenset(hidden)
        return MARK.sub(
            lambda found: (
                "" if self._texts.get(found[0], "") in left_out else self._texts[found[0]]
            ),
            text,
        )
