"""Where the log cannot be written, the program goes on."""

import contextlib
import io
from collections.abc import Iterator
from typing import TextIO

import pytest
import structlog

from services.launcher.console.console import PlainConsole
from shared.telemetry.logs import configure_logs
from shared.telemetry.lossy_stream import LossyStream


@pytest.fixture
def full() -> Iterator[TextIO]:
    """A file on a full disk."""
    # What is buffered cannot be written at the end either.
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as file:
        yield file


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before)


@pytest.mark.usefixtures("logs_as_before")
def test_a_full_disk_under_the_log_raises_nothing(full: TextIO) -> None:
    configure_logs("service", "info", "json", full)
    structlog.get_logger().warning("nobody reads this", size="x" * 10_000)
    screen = PlainConsole(["decoder"], prefix=True, stream=full)
    screen.state("decoder", "ready")
    screen.line("decoder", "x" * 10_000)


def test_writable_streams_get_everything() -> None:
    there = io.StringIO()
    print("a line", file=LossyStream(there), flush=True)
    assert there.getvalue() == "a line\n"
