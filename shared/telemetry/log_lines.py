"""What a log line is made of: bounded values, tracebacks without what clients sent, one write for each line."""

import json
import math
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from shared.telemetry.request_names import trace_of
from shared.text.cutting import cut

_LONGEST_VALUE = 2_000
_LONGEST_TRACEBACK = 20_000
_LONGEST_MESSAGE = 1_000
_MOST_FRAMES = 30  # of one exception: those nearest to where it was raised
_EVENT_WIDTH = 32
_WORD = re.compile(r"[^\s=\[\]{}\"']+", re.ASCII)
_MOST_LINKED = 8  # causes of causes, and members of groups

_CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"


class Lines:
    """The innermost logger: writes whole lines, from any thread.

    A stream that refuses the line (a full disk, a closed pipe) costs the line and nothing else.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._turn = threading.Lock()

    def write(self, line: str) -> None:
        """Writes a line in one piece."""
        with self._turn:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # ValueError: it is closed, or cannot be encoded
                pass

    debug = info = warning = error = critical = write


_has_colours = True  # where people look at them


def in_service(service: str) -> Processor:
    """Adds the service's name to each line, whatever thread or task it comes from."""

    def name(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return name


def as_traceback(*, quotes_errors: bool) -> Processor:
    """Turns `exc_info` into the text `exception`: places and source lines, never the values of variables.

    `quotes_errors`: with the messages of all exceptions. Without, only with those that come from the system below, not
    from what was handled: a message may quote what a client sent.
    """

    def format_exception(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        error = _error_of(event.pop("exc_info", None))
        if error is not None:
            text = "".join(_traceback_lines(error, quotes_errors, set())).rstrip()
            event["exception"] = cut(text, _LONGEST_TRACEBACK)
        return event

    return format_exception


def bound_values(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Values are numbers, or texts of at most 2,000 characters but for the traceback; lists are texts with commas."""
    for name, value in event.items():
        if isinstance(value, str):
            if len(value) > _LONGEST_VALUE and name != "exception":
                event[name] = cut(value, _LONGEST_VALUE)
        elif isinstance(value, float):
            if not math.isfinite(value):  # has no place in JSON
                event[name] = str(value)
        elif value is not None and not isinstance(value, int):
            if isinstance(value, (list, tuple)):
                value = ", ".join(map(str, value))
            event[name] = cut(str(value), _LONGEST_VALUE)
    return event


def with_trace(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Each line about a request names its trace, by which programs find it: the client's, or the request's own."""
    request_id = event.get("request_id")
    if isinstance(request_id, str) and "trace_id" not in event:
        event["trace_id"] = trace_of(request_id)
    return event


def to_json(_: WrappedLogger, __: str, event: EventDict) -> str:
    """The line as a JSON object."""
    return json.dumps(event)


def leave_out_colours() -> None:
    """Lines are plain on terminals too."""
    global _has_colours
    _has_colours = False


def to_text(stream: TextIO) -> Processor:
    """The line for people, with colours on a terminal."""
    if not stream.isatty() or not _has_colours:
        return _plain
    return structlog.dev.ConsoleRenderer(
        pad_event_to=_EVENT_WIDTH, exception_formatter=structlog.dev.plain_traceback
    )


def _plain(_: WrappedLogger, __: str, event: EventDict) -> str:
    """What structlog's renderer writes without colours, in a third of its time: there is a line for each request."""
    pop = event.pop
    begin = f"{pop('timestamp', '')} [{pop('level', ''):<9}] {pop('event', ''):<{_EVENT_WIDTH}} "
    exception = pop("exception", "")
    fields = [f"{name}={_quoted(value)}" for name, value in sorted(event.items())]
    line = (begin + " ".join(fields)).rstrip()
    return line + (f"\n{exception}" if exception else "")


def _quoted(value: object) -> str:
    """A text as it is where it is one word, else with quotes."""
    text = str(value)
    if isinstance(value, str) and not _WORD.fullmatch(text):
        return repr(text)
    return text


def _error_of(given: Any) -> BaseException | None:
    if isinstance(given, BaseException):
        return given
    if isinstance(given, tuple):
        return given[1] if isinstance(given[1], BaseException) else None
    if not given:
        return None
    return sys.exc_info()[1]


def _traceback_lines(error: BaseException, quotes: bool, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen and len(seen) < _MOST_LINKED:
        yield from _traceback_lines(before, quotes, seen)
        yield _CAUSED if error.__cause__ is before else _MEANWHILE
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_list(
            traceback.extract_tb(error.__traceback__, limit=-_MOST_FRAMES)
        )
    yield f"{_name(error)}{_message(error, quotes)}\n"
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            if id(member) not in seen and len(seen) < _MOST_LINKED:
                yield "\nOne of the group:\n"
                yield from _traceback_lines(member, quotes, seen)


def _name(error: BaseException) -> str:
    kind = type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException, quotes: bool) -> str:
    if quotes or isinstance(error, OSError):
        try:
            text = str(error)
        except Exception:  # formatting failed: the original error is what matters
            return ""
    else:
        text = getattr(error, "unquoting", "")  # our own errors have a form that quotes nothing
    return f": {cut(text, _LONGEST_MESSAGE)}" if text else ""
