"""Logs: one line an event, as text for people or as JSON for machines, with the room's name on each."""

import logging
import sys
import time
from typing import TextIO

import structlog

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure_logs(
    room: str, level: str = "info", style: str = "text", stream: TextIO | None = None
) -> None:
    """Sends structlog and the standard library's loggers to stderr, or to `stream`.

    Called once, at the start of a process.
    """
    stream = stream or sys.stderr
    threshold = _LEVELS.get(level.lower(), logging.INFO)
    render: list[structlog.typing.Processor]
    if style == "json":
        render = [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ]
    else:
        render = [structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=32)]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(
            fmt="%H:%M:%S.%f" if style == "text" else "iso", utc=style == "json"
        ),
    ]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(room=room)
    logging.basicConfig(
        level=max(threshold, logging.WARNING),
        format=f"%(asctime)s [%(levelname)s] %(name)s: %(message)s room={room}",
        stream=stream,
        force=True,
    )


class Stopwatch:
    """Microseconds between laps, by the monotonic clock."""

    def __init__(self) -> None:
        self._last = time.perf_counter_ns()

    def lap_us(self) -> int:
        """Microseconds since the last lap, or since it was made."""
        now = time.perf_counter_ns()
        elapsed = (now - self._last) // 1000
        self._last = now
        return elapsed
