"""Reads JSON one character at a time: generators that are sent characters, so that their state is their place in the
code. Each returns when the last character of what it reads has come.
"""

import json
import re
from collections.abc import Generator

_SPACE = " \t\n\r"
_ENDS_SCALAR = frozenset(",}]" + _SPACE)

Reader = Generator[None, str, None]


class Malformed(Exception):
    """What was read is no call. `rest` is what has not been read."""

    rest = ""


MARKS = re.compile("[\ud800-\udfff]")  # what stands for marker tokens (`markers.py`)


def is_mark(char: str) -> bool:
    """Whether a character stands for a marker token (`markers.py`)."""
    return "\ud800" <= char <= "\udfff"


def behind_space() -> Generator[None, str, str]:
    """Returns the next character that is no white space."""
    char = yield
    while char in _SPACE:
        char = yield
    return char


def read_string() -> Generator[None, str, str]:
    """Returns the value of a string whose opening quote has been read."""
    raw: list[str] = []
    yield from copy_string(raw)
    try:
        value = json.loads('"' + "".join(raw), strict=False)
    except ValueError:
        raise Malformed from None
    return str(value)


def copy_string(out: list[str]) -> Reader:
    """Copies what is behind the opening quote of a string, up to the closing one."""
    escaped = False
    while True:
        char = yield
        if is_mark(char):
            raise Malformed
        out.append(char)
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == '"':
            return


def copy_nested(out: list[str], first: str) -> Reader:
    """Copies an object or a list that begins with `first`."""
    out.append(first)
    closers = ["}" if first == "{" else "]"]
    while closers:
        char = yield
        if is_mark(char):
            raise Malformed
        out.append(char)
        if char == '"':
            yield from copy_string(out)
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
        elif char in "}]" and char != closers.pop():
            raise Malformed


def copy_value(out: list[str], first: str) -> Generator[None, str, str]:
    """Copies a value that begins with `first`; returns the first character behind it and white space."""
    if first == '"':
        out.append(first)
        yield from copy_string(out)
        return (yield from behind_space())
    if first in "{[":
        yield from copy_nested(out, first)
        return (yield from behind_space())
    char = first
    while char not in _ENDS_SCALAR:
        if is_mark(char):
            raise Malformed
        out.append(char)
        char = yield
    return (yield from behind_space()) if char in _SPACE else char
