"""Logs: one line an event, as text for people or as JSON for machines, there with the service's name."""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

from shared.environment import monotonic
from shared.telemetry.log_lines import (
    Lines,
    as_traceback,
    bound_values,
    in_service,
    to_json,
    to_text,
    with_trace,
)

log = structlog.get_logger(__name__)

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure_logs(
    service: str,
    level: str = "info",
    style: str = "text",
    stream: TextIO | None = None,
    *,
    quotes_errors: bool = True,
) -> None:
    """Sends everything that this process logs to stderr, or to `stream`: structlog's lines, those of the standard
    library's loggers, warnings, and uncaught exceptions.

    `quotes_errors` is False in services that read what clients wrote: tracebacks then leave out the messages of
    exceptions.
    Called once, at the start of a process.
    """
    stream = stream or sys.stderr
    threshold = _LEVELS.get(level.lower(), logging.INFO)
    lines = Lines(stream)
    begin: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(
            fmt="%H:%M:%S.%f" if style == "text" else "iso", utc=style == "json"
        ),
    ]
    # Whoever shows text says before each line which process it is from: the launcher, docker, a terminal of its own.
    written = (
        [in_service(service), with_trace, bound_values, to_json]
        if style == "json"
        else [bound_values, to_text(stream)]
    )
    end: list[Processor] = [*written]
    processors = [*begin, as_traceback(quotes_errors=quotes_errors), *end]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(
        level=max(threshold, logging.WARNING), handlers=[_Libraries(processors, lines)], force=True
    )
    logging.captureWarnings(True)
    # Exceptions that end the main thread are about the start: no request is being read.
    sys.excepthook = _log_uncaught([*begin, as_traceback(quotes_errors=True), *end], lines)
    threading.excepthook = _on_thread_error
    sys.unraisablehook = _on_unraisable


def on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The exception handler of an event loop: a line without the values that the loop's own one shows."""
    # After a bracket the message quotes the call with its arguments.
    what = str(context.get("message", "")).partition("<")[0].partition("(")[0].strip()
    task = context.get("task") or context.get("future")
    name = task.get_name() if isinstance(task, asyncio.Task) else None
    log.error("error in the event loop", what=what, task=name, exc_info=context.get("exception"))


class _Libraries(logging.Handler):
    """Lines of the standard library's loggers, written as ours."""

    def __init__(self, processors: list[Processor], lines: Lines) -> None:
        super().__init__()
        self._processors = processors
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        try:
            message = record.getMessage()
        except Exception:  # its arguments do not fit
            message = str(record.msg)
        event: EventDict = {"event": message.strip(), "logger": record.name}
        if record.exc_info:
            event["exc_info"] = record.exc_info
        _write(self._processors, self._lines, record.levelname.lower(), event)


def _write(processors: list[Processor], lines: Lines, level: str, event: EventDict) -> None:
    made: Any = event
    for processor in processors:
        made = processor(None, level, made)
    lines.write(made)


def _log_uncaught(
    processors: list[Processor], lines: Lines
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def log_it(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            _write(processors, lines, "critical", {"event": "the process ends", "exc_info": error})

    return log_it


def _on_thread_error(hook: threading.ExceptHookArgs) -> None:
    if hook.exc_type is not SystemExit:
        name = hook.thread.name if hook.thread is not None else None
        log.error("a thread ends", thread=name, exc_info=hook.exc_value)


def _on_unraisable(unraisable: Any) -> None:
    where = getattr(unraisable.object, "__qualname__", type(unraisable.object).__name__)
    log.error("an exception that could not be raised", where=where, exc_info=unraisable.exc_value)


class Stopwatch:
    """Microseconds between laps, by the monotonic clock."""

    def __init__(self) -> None:
        self._last = monotonic()

    def lap_us(self) -> int:
        """Microseconds since the last lap, or since it was made."""
        now = monotonic()
        elapsed = int((now - self._last) * 1e6)
        self._last = now
        return elapsed

    def skip_to(self, moment: float) -> int:
        """The lap begins at `moment`, by `monotonic`, if it began before; returns the microseconds that are left
        out."""
        left_out = max(0.0, moment - self._last)
        self._last += left_out
        return int(left_out * 1e6)
