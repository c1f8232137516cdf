"""Expressions of texts that are written within a string of JSON.

Each character of such a text, a unit, is written in one way: as itself, or, where JSON asks for that, as an escape.
None of these ways begins another one, so what is written can be read in one way alone, and what is written for the
texts of an expression is an expression.
"""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLTokenizer

from services.gateway.reading.structured.errors import FormError

# Characters that are written as an escape, and all others as a class.
_ESCAPED = [chr(code) for code in range(32)] + ['"', "\\"]
_OTHERS = r'[^"\\\x00-\x1f]'
_GROUP = re.compile(
    r"\(\?(?:P?<[A-Za-z_][\w.\[\]]*>|(?P<on>[imsu]*)(?:-(?P<off>[ims]+))?(?P<end>[:)]))"
)
_COUNT = re.compile(r"\{[0-9]*(?:,[0-9]*)?\}")
_ESCAPE = re.compile(
    r"\\(?:[xuU]\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[pP](?:\{[^{}]*\}|.)|.)",
    re.DOTALL,
)
_REPEATS = ("*", "+", "{")
# Characters that mean something in an expression or end its literal.
_MEANING = frozenset(".+*?()|[]{}^$#&-~/")
# Whose tokens are bytes.
_BYTES = LLTokenizer("byte")


@dataclass(slots=True)
class Written:
    """A literal of Lark's for what is written. `units`: for each unit in it which escaped characters it may be."""

    literal: str = ""
    units: list[frozenset[str]] = field(default_factory=list)
    repeats: bool = False
    # There is one sequence of units, and a unit at its begin and end that is always there, and once.
    is_bounded: bool = False
    # Without the repetition, where that is of one unit.
    one: str = ""


def written_string(value: str, *, any_case: bool) -> Written:
    """Of a string."""
    units = [frozenset([char]) & frozenset(_ESCAPED) for char in value]
    if any_case and value:
        return Written(f"/(?i:{''.join(map(_character, value))})/", units, is_bounded=True)
    text = json.dumps(json.dumps(value, ensure_ascii=False)[1:-1], ensure_ascii=False)
    return Written(text.replace("\x7f", "\\u007f"), units, is_bounded=bool(value))


def written_expression(text: str, flags: str = "") -> Written:
    """Of an expression as it stands between slashes in Lark. Raises FormError."""
    if "x" in flags:
        raise FormError("the flag x of an expression is not taken in the input of a tool")
    walk = _Walk(text, frozenset(flags))
    pieces = list(walk.pieces())
    kept = flags.replace("u", "")
    found = Written(f"/{''.join(pieces)}/{kept}", walk.units, walk.repeats)
    found.is_bounded = walk.begins_with_unit and walk.ends_with_unit and not walk.has_choice
    if len(pieces) == 2 and pieces[1] in ("+", "*"):
        found.one = f"/{pieces[0]}/{kept}"
    return found


class _Walk:
    """Goes through an expression."""

    def __init__(self, text: str, flags: frozenset[str]) -> None:
        self.units: list[frozenset[str]] = []
        self.repeats = self.has_choice = self.begins_with_unit = self.ends_with_unit = False
        self._text = text
        self._flags = flags  # those that hold here
        self._outer: list[frozenset[str]] = []

    def pieces(self) -> Iterator[str]:
        """What is written for it, piece by piece."""
        text, place, count = self._text, 0, 0
        while place < len(text):
            begin, known = place, len(self.units)
            place, piece = self._next(place)
            is_unit = len(self.units) > known
            count += 1
            if count == 1:
                self.begins_with_unit = is_unit
            elif count == 2 and piece[0] in "*+?{" and not is_unit:
                self.begins_with_unit = False
            self.repeats = self.repeats or (text[begin] in _REPEATS and not is_unit)
            self.has_choice = self.has_choice or text[begin] == "|"
            self.ends_with_unit = is_unit
            yield piece

    def _next(self, place: int) -> tuple[int, str]:
        text, char = self._text, self._text[place]
        if char == "\\":
            end = _end(_ESCAPE, text, place)
            return end, self._unit(text[place:end])
        if char == "[":
            end = _behind_class(text, place)
            return end, self._unit(text[place:end])
        if char == "{":
            end = _end(_COUNT, text, place)
            return end, text[place:end]
        if text.startswith("(?", place):
            end = _end(_GROUP, text, place)
            self._open(text, place)
            return end, text[place:end]
        if char == "(":
            self._outer.append(self._flags)
        elif char == ")" and self._outer:
            self._flags = self._outer.pop()
        if char == ".":
            return place + 1, self._unit(r"[\x00-\x{10ffff}]" if "s" in self._flags else r"[^\n]")
        if char in "()|*+?^$":
            return place + 1, char
        self.units.append(frozenset([char]) & frozenset(_ESCAPED))
        return place + 1, _character(char)

    def _open(self, text: str, place: int) -> None:
        group = _GROUP.match(text, place)
        assert group is not None
        if group["end"] != ")":
            self._outer.append(self._flags)
        self._flags |= frozenset(group["on"] or "")
        self._flags -= frozenset(group["off"] or "")

    def _unit(self, expression: str) -> str:
        """What is written for one character of a class."""
        named = "".join(sorted(self._flags & frozenset("ims")))
        held = _held(f"(?{named}:{expression})" if named else expression)
        self.units.append(frozenset(held))
        return rf"(?:[{expression}&&{_OTHERS}]|{_escapes(held)})" if held else expression


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    if found is None:
        shown = text[place : place + 8]
        raise FormError(f"{shown!r} in an expression is not taken in the input of a tool")
    return found.end()


def _behind_class(text: str, place: int) -> int:
    """Classes may hold others."""
    depth = 0
    while place < len(text):
        char = text[place]
        place += 2 if char == "\\" else 1
        if char == "[":
            depth += 1
            place += text.startswith("^", place)
            place += text.startswith("]", place)
        elif char == "]":
            depth -= 1
            if not depth:
                break
    return place


def _character(char: str) -> str:
    """One that stands for itself, in an expression."""
    if char in _ESCAPED:
        return _escapes([char])
    return f"\\{char}" if char in _MEANING else char


def _escapes(chars: list[str]) -> str:
    """An expression of the escapes of characters."""
    written = [json.dumps(char)[2:-1] for char in chars]
    short = "".join(one if one != "\\" else r"\\" for one in written if len(one) == 1)
    found = [f"[{short}]"] if short else []
    codes = [one[3:] for one in written if len(one) > 1]
    found += [f"u00(?:{'|'.join(codes)})"] if codes else []
    return rf"(?-i:\\(?:{'|'.join(found)}))"


@functools.lru_cache(maxsize=256)
def _held(expression: str) -> list[str]:
    """Which of the characters that are escaped an expression of one character matches: as llguidance reads it."""
    matcher = LLMatcher(_BYTES, LLMatcher.grammar_from_lark(f"start: /{expression}/"))
    if matcher.is_error():
        raise FormError(f"{expression[:64]!r} in an expression is not taken in the input of a tool")
    return [char for char in _ESCAPED if matcher.validate_tokens([ord(char)])]
