"""From the arguments of a call to the one text that a custom tool takes: the model knows such a tool as a function with
one string.
"""

import json
from collections.abc import Generator

from shared.output_format.json_reader import (
    Malformed,
    Reader,
    behind_space,
    copy_value,
    read_string,
)

INPUT = "input"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
# What stands for half of a surrogate pair, which no text can hold.
_BROKEN = "\ufffd"


class InputReader:
    """Reads the JSON text of one call's arguments. What it has given after some of it depends on that alone."""

    def __init__(self) -> None:
        self._out: list[str] = []
        # All of the arguments, as long as the input was not found in them.
        self._raw: list[str] = []
        self._is_found = self._is_over = False
        self._work = self._reading()
        next(self._work)

    def push(self, arguments: str) -> str:
        """Takes more of the arguments, and returns what is new of the input."""
        if not self._is_found:
            self._raw.append(arguments)
        for char in arguments:
            if self._is_over:
                break
            try:
                self._work.send(char)
            except (StopIteration, Malformed):
                self._is_over = True
        text = "".join(self._out)
        self._out.clear()
        return text

    def finish(self) -> str:
        """What is left of a call that is whole: of one that has no `input` its only text, or all that was written."""
        if self._is_found:
            return ""
        raw = "".join(self._raw)
        try:
            found = json.loads(raw, strict=False)
        except (ValueError, RecursionError):
            return raw
        if not isinstance(found, dict):
            return raw
        texts = [value for value in found.values() if isinstance(value, str)]
        if len(found) == len(texts) == 1:
            return texts[0].encode(errors="replace").decode()
        return raw if found else ""

    def _reading(self) -> Reader:
        first = yield from behind_space()
        if first == '"':
            yield from self._text()
        if first != "{":
            return
        char = yield from behind_space()
        while char == '"':
            key = yield from read_string()
            if (yield from behind_space()) != ":":
                return
            char = yield from self._member(key, (yield from behind_space()))
            if char == ",":
                char = yield from behind_space()

    def _member(self, key: str, first: str) -> Generator[None, str, str]:
        """A value that begins with `first`; returns the first character behind it."""
        if key != INPUT or self._is_found:
            return (yield from copy_value([], first))
        if first == '"':
            yield from self._text()
            return (yield from behind_space())
        self._is_found = True
        return (yield from copy_value(self._out, first))

    def _text(self) -> Reader:
        """A string behind its opening quote, without its escapes."""
        self._is_found, high = True, 0
        while True:
            char = yield
            code = -1
            if char == "\\":
                char = yield
                if char == "u":
                    code = yield from _code()
                else:
                    char = _ESCAPES.get(char, char)
            elif char == '"':
                char = ""
            if high and 0xDC00 <= code < 0xE000:
                self._out.append(chr(0x10000 + ((high & 0x3FF) << 10) + (code & 0x3FF)))
                high = 0
                continue
            if high:
                self._out.append(_BROKEN)
            high = code if 0xD800 <= code < 0xDC00 else 0
            if high:
                continue
            if code >= 0:
                char = _BROKEN if 0xDC00 <= code < 0xE000 else chr(code)
            if not char:
                return
            self._out.append(char)


def _code() -> Generator[None, str, int]:
    digits = ""
    for _ in range(4):
        digits += yield
    try:
        return int(digits, 16)
    except ValueError:
        raise Malformed from None
