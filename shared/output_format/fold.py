"""From an answer's text to what it is made of: content, reasoning, calls. A pure fold over characters: what it has
given after some text depends on that text alone, however it was cut.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from shared.output_format.call_reader import CallReader
from shared.output_format.custom_input import InputReader
from shared.output_format.deltas import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Delta,
    Reasoning,
    joined,
)
from shared.output_format.json_reader import Malformed, is_mark
from shared.output_format.markers import TokenMarkers
from shared.output_format.table import Body, OutputFormat, ReasoningFormat

_STARTS = {Body.JSON: "{", Body.PYTHONIC: "["}


class End(Enum):
    """How an answer ends."""

    BY_ITSELF = auto()  # the model has written all of it
    AT_STOP = auto()  # behind it there is a stop string
    CUT_OFF = auto()  # it could have gone on


class MessageFold:
    """Folds the text of one choice, in which marker tokens are characters of `markers`."""

    def __init__(
        self,
        calls: OutputFormat | None,
        reasoning: ReasoningFormat | None,
        markers: TokenMarkers,
        *,
        in_reasoning: bool = False,
        tools: Mapping[str, Any] | None = None,
        single_call: bool = False,
        hidden: frozenset[str] = frozenset(),
        custom: Mapping[str, bool] | None = None,
    ) -> None:
        """`in_reasoning`: the prompt has opened the reasoning. `tools`: the schemas of their parameters by name.
        `single_call`: further calls are left out. `hidden`: marker tokens that are left out of what is shown. `custom`:
        tools that take one text, by name, and whether that is a JSON string where arguments are written as they are.
        """
        self._calls = calls and markers.row(calls)
        self._reasoning = reasoning and markers.row(reasoning)
        self._markers = markers
        self._tools = tools or {}
        self._single = single_call
        self._hidden = hidden
        self._custom = custom or {}
        self._quoted = frozenset(name for name, is_quoted in self._custom.items() if is_quoted)
        # Of a call of such a tool that has begun.
        self._input: InputReader | None = None
        # Text that is not sorted yet; white space behind content, which a call would swallow.
        self._buffer, self._space = "", ""
        self._trims = False
        # Whether the marker around calls has been opened.
        self._inside = False
        self._out: list[Delta] = []
        self._reader: CallReader | None = None
        # Of a call whose tool is not known yet: its text, which is content if there is none.
        self._raw, self._begun = "", False
        # Whether it begins without a marker.
        self._is_bare = False
        self._index = 0
        self.calls_closed = 0
        self._state: Callable[[], bool] = self._begin
        if in_reasoning and self._reasoning is not None:
            self._state, self._trims = self._reason, True

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._state == self._reason

    def push(self, text: str) -> list[Delta]:
        """Takes more text, and returns what is certain now."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._given()

    def finish(self, end: End = End.BY_ITSELF) -> list[Delta]:
        """What is left at the end. A call that is not whole stays as it is; one whose tool is not known yet is left
        out, but where the model ended its answer by itself: then it was none.
        """
        rest, self._buffer = self._buffer, ""
        if self._state == self._reason:
            self._think(rest)
        elif self._state in (self._array, self._call):
            if not self._begun:
                self._leave(self._raw + rest, end)
        elif self._state in (self._begin, self._text):
            # A stop string behind it goes on with it as text does.
            is_open = end is End.CUT_OFF or (end is End.AT_STOP and self._inside)
            begun = self._begun_marker(rest) if is_open else 0
            self._say(rest[: len(rest) - begun])
            self._space = "" if begun else self._space
        if not self._index and self._space:
            self._out.append(Content(self._space))
        return self._given()

    def _leave(self, text: str, end: End) -> None:
        """What would have become a call."""
        if end is End.BY_ITSELF or (self._is_bare and not self._may_be_call(text)):
            self._say(text)
        else:
            self._space = ""

    def _may_be_call(self, text: str) -> bool:
        """Of a text that begins without a marker, as JSON may that is the answer itself."""
        written = "".join(text.split())
        begins = ["[{}("]
        if self._calls is not None and self._calls.body is not Body.PYTHONIC:
            begins = ['{{"name":"{}"', '{{"type":"function","name":"{}"']
        calls = ["".join(begin.format(name).split()) for name in self._tools for begin in begins]
        return any(call.startswith(written) or written.startswith(call) for call in calls)

    def _begun_marker(self, rest: str) -> int:
        """How many characters at the end of what was held may begin the marker of a call."""
        calls = self._calls
        markers = (calls.open, *(calls.around or ())) if calls is not None else ()
        return _held(rest, [marker for marker in self._wanted() if marker in markers])

    def _given(self) -> list[Delta]:
        found, self._out = self._out, []
        return joined(found)

    # States: each takes what it can from the buffer, and returns whether there may be more to do.

    def _begin(self) -> bool:
        """Before content: reasoning may begin whose marker is no token, and a call without a marker."""
        calls, reasoning = self._calls, self._reasoning
        text = self._buffer.lstrip()
        if reasoning is not None and reasoning.open.startswith(text) and text != reasoning.open:
            return False
        if reasoning is not None and text.startswith(reasoning.open):
            self._buffer = text[len(reasoning.open) :]
            self._space, self._trims, self._state = "", True, self._reason
        elif calls is not None and calls.at_start and not text:
            return False
        elif calls is not None and calls.at_start and text[0] == _STARTS[calls.body]:
            self._say(self._buffer[: len(self._buffer) - len(text)])
            self._buffer = text
            self._open("", needs_known=True)
        else:
            self._state = self._text
        return True

    def _text(self) -> bool:
        wanted = self._wanted()
        found = [(place, -len(m), m) for m in wanted if (place := self._buffer.find(m)) >= 0]
        if not found:
            held = _held(self._buffer, wanted)
            self._say(self._buffer[: len(self._buffer) - held])
            self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        place, _, marker = min(found)
        self._say(self._buffer[:place])
        self._buffer = self._buffer[place + len(marker) :]
        calls, reasoning = self._calls, self._reasoning
        if reasoning is not None and marker == reasoning.open:
            self._space, self._trims, self._state = "", True, self._reason
        elif calls is not None and marker == calls.open:
            self._open(marker)
        elif calls is not None and calls.around is not None:
            self._inside = marker == calls.around[0]
            self._space, self._trims = "", True
        return True

    def _wanted(self) -> list[str]:
        calls, reasoning, wanted = self._calls, self._reasoning, []
        if calls is not None:
            wanted = list(calls.around or ())
            if calls.open and (self._inside or not wanted or is_mark(calls.open[0])):
                wanted.append(calls.open)
        if reasoning is not None and is_mark(reasoning.open[0]):
            wanted.append(reasoning.open)
        return wanted

    def _reason(self) -> bool:
        assert self._reasoning is not None
        close = self._reasoning.close
        text, found, rest = self._buffer.partition(close)
        held = 0 if found else _held(self._buffer, [close])
        self._think(text[: len(text) - held])
        self._buffer = rest if found else text[len(text) - held :]
        if found:
            self._space, self._trims, self._state = "", True, self._begin
        return bool(found)

    def _array(self) -> bool:
        """Behind the marker of an array of calls."""
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] == "[":
            self._buffer = text[1:]
            self._read_call(self._raw + "[")
        else:
            self._say(self._raw)
            self._state = self._text
        return True

    def _call(self) -> bool:
        reader, text = self._reader, self._buffer
        assert reader is not None
        rest: str | None
        try:
            rest = reader.push(text)
        except Malformed as error:
            self._give(reader, text[: len(text) - len(error.rest)])
            self._buffer, self._reader = error.rest, None
            if self._begun:
                self._index += 1
                self._state = self._close
            else:
                self._say(self._raw)
                self._state = self._text
            return True
        self._buffer = rest or ""
        self._give(reader, text[: len(text) - len(self._buffer)])
        if rest is None:
            return False
        self._reader = None
        for name, arguments in reader.listed:
            self._begin_call(name)
            self._arguments(arguments)
            self._end_call()
        if not reader.listed:
            self._end_call()
        self._state = self._between if reader.closed else self._close
        return True

    def _close(self) -> bool:
        """Behind what a call holds."""
        assert self._calls is not None
        text = self._buffer.lstrip()
        for marker in (self._calls.tail.strip(), self._calls.close):
            if marker and text.startswith(marker):
                text = text[len(marker) :].lstrip()
            elif marker and marker.startswith(text):
                return False
        self._buffer, self._state = text, self._between
        return True

    def _between(self) -> bool:
        """Behind a call: another one, or content."""
        calls = self._calls
        assert calls is not None
        text = self._buffer = self._buffer.lstrip()
        if not text:
            return False
        self._state = self._text
        if calls.body is Body.JSON_ARRAY and text[0] in ",]":
            self._buffer = text[1:]
            if text[0] == ",":
                self._read_call(text[0])
        elif calls.between and text.startswith(calls.between):
            self._buffer, self._state = text[len(calls.between) :], self._begin
        return True

    def _open(self, marker: str, *, needs_known: bool = False) -> None:
        assert self._calls is not None
        self._raw, self._begun, self._is_bare = marker, False, needs_known
        if self._calls.body is Body.JSON_ARRAY:
            self._state = self._array
        else:
            self._read_call(marker, needs_known=needs_known)

    def _read_call(self, raw: str, *, needs_known: bool = False) -> None:
        """A call begins behind `raw`."""
        assert self._calls is not None
        self._raw, self._begun, self._state = raw, False, self._call
        self._reader = CallReader(
            self._calls, self._tools, needs_known=needs_known, quoted=self._quoted
        )

    def _give(self, reader: CallReader, read: str) -> None:
        """What a call's reader knows by now, `read` being what it has read of it."""
        if not self._begun:
            self._raw += read
            if reader.name:
                self._begin_call(reader.name)
        self._arguments(reader.take())

    def _begin_call(self, name: str) -> None:
        self._raw, self._space = "", ""
        self._begun = self._trims = True
        self._input = InputReader() if name in self._custom else None
        self._call_delta(CallBegin(self._index, name, self._input is not None))

    def _arguments(self, text: str) -> None:
        """More of what the call that has begun is given."""
        if self._input is not None:
            text = self._input.push(text)
        if text:
            self._call_delta(CallArguments(self._index, text, self._input is not None))

    def _end_call(self) -> None:
        if self._input is not None and (rest := self._input.finish()):
            self._call_delta(CallArguments(self._index, rest, is_custom=True))
        self._call_delta(CallEnd(self._index))
        self._index += 1
        self.calls_closed += 1

    def _call_delta(self, delta: Delta) -> None:
        if self._index == 0 or not self._single:
            self._out.append(delta)

    def _say(self, text: str) -> None:
        """Content; white space that a region may swallow is held."""
        text = self._markers.shown(text, self._hidden)
        if self._trims:
            text = text.lstrip()
            if not text:
                return
            self._trims = False
        text = self._space + text
        kept = text.rstrip() if self._calls is not None else text
        self._space = text[len(kept) :]
        if kept:
            self._out.append(Content(kept))

    def _think(self, text: str) -> None:
        text = self._space + self._markers.shown(text, self._hidden)
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._out.append(Reasoning(kept))


def _held(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end may begin a marker."""
    most = min(len(text), max(map(len, markers), default=1) - 1)
    for size in range(most, 0, -1):
        if any(marker.startswith(text[len(text) - size :]) for marker in markers):
            return size
    return 0
