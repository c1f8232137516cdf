"""What the launcher shows: the states of the processes while they start, and the log lines of all of them."""

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Protocol, Self, TextIO, cast

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shared.telemetry.lossy_stream import LossyStream

_COLOURS = {
    "starting": "yellow",
    "loading": "yellow",
    "ready": "green",
    "not ready": "yellow",
    "restarting": "red",
    "failed": "bold red",
    "stopping": "dim",
    "stopped": "dim",
}


class Console(Protocol):
    """Where states and lines are shown; a context manager around the start."""

    def state(self, name: str, state: str) -> None:
        """A process has reached a state."""
        ...

    def line(self, name: str, line: str) -> None:
        """A process has printed a line."""
        ...

    def settle(self) -> None:
        """The start is over: from now on only lines are shown."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class _States:
    """The state of each process, and since when."""

    def __init__(self, names: Sequence[str]) -> None:
        self.width = max(len(name) for name in [*names, "launcher"])
        self._began = {name: time.monotonic() for name in names}
        self.state = dict.fromkeys(names, "waiting")
        self.took_s: dict[str, float] = {}

    def change(self, name: str, state: str) -> bool:
        """Sets the state; whether it is another one than before."""
        if self.state.get(name) == state:
            return False
        if state in ("starting", "restarting", "not ready"):
            self._began[name] = time.monotonic()
        self.state[name] = state
        self.took_s[name] = self.seconds(name)
        return True

    def seconds(self, name: str) -> float:
        """Seconds since it was started, or since it stopped being ready."""
        return time.monotonic() - self._began[name]


class PlainConsole:
    """For pipes and files: one line for each change."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        prefix: bool,
        shows_states: bool = True,
        stream: TextIO = sys.stderr,
    ) -> None:
        self._states = _States(names)
        self._shows_states = shows_states
        self._prefix = prefix
        self._stream = cast(TextIO, LossyStream(stream))

    def state(self, name: str, state: str) -> None:
        """One line for each change."""
        if not self._states.change(name, state) or not self._shows_states:
            return
        seconds = round(self._states.seconds(name), 1)
        if self._prefix:
            self.line(name, f"{state} after {seconds} s" if state == "ready" else state)
        else:
            event = {"service": "launcher", "event": state, "level": "info", "seconds": seconds}
            self.line(name, json.dumps(event))

    def line(self, name: str, line: str) -> None:
        """The line after the name, or as JSON with the name in it."""
        shown = f"{name:<{self._states.width}} | {line}" if self._prefix else _as_json(name, line)
        print(shown, file=self._stream, flush=True)

    def settle(self) -> None:
        """Nothing to clear."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class LiveConsole:
    """For terminals: a table that changes in place, log lines above it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._console = RichConsole(stderr=True, highlight=False)
        self._states = _States(names)
        self._live = Live(
            get_renderable=self._table, console=self._console, refresh_per_second=8, transient=False
        )
        self._settled = False

    def state(self, name: str, state: str) -> None:
        """Changes its row; after the start, a line."""
        if self._states.change(name, state) and self._settled:
            self.line(name, state)

    def line(self, name: str, line: str) -> None:
        """Above the table, the name dimmed."""
        text = Text()
        text.append(f"{name:<{self._states.width}} | ", style="dim")
        text.append_text(Text.from_ansi(line))
        self._console.print(text, soft_wrap=True)

    def settle(self) -> None:
        """Leaves the table where it is."""
        if not self._settled:
            self._settled = True
            self._live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self._states.state.items():
            seconds = self._states.took_s[name] if state == "ready" else self._states.seconds(name)
            table.add_row(name, Text(state, style=_COLOURS.get(state, "")), f"{seconds:.1f} s")
        return table

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.settle()


def _as_json(name: str, line: str) -> str:
    """The line as a JSON object with the process's name and a time. Lines that are no JSON come from libraries that
    write to stderr themselves.
    """
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        event = {"event": line, "level": "warning"}
    event.setdefault("timestamp", datetime.now(UTC).isoformat().replace("+00:00", "Z"))
    return json.dumps({**event, "process": name})


class KeptConsole:
    """Another console whose lines are also kept: `keep(name, line)` gets each."""

    def __init__(self, console: Console, keep: Callable[[str, str], None]) -> None:
        self._console = console
        self._keep = keep
        self.state = console.state
        self.settle = console.settle

    def line(self, name: str, line: str) -> None:
        """Keeps and shows it."""
        self._keep(name, line)
        self._console.line(name, line)


class ConsoleStream(io.TextIOBase):
    """A text stream whose lines the console shows as the launcher's own."""

    def __init__(self, console: Console | KeptConsole) -> None:
        self._console = console
        self._unfinished = ""

    def write(self, text: str) -> int:
        """Shows each line once it is complete."""
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            self._console.line("launcher", line)
        return len(text)


def open_console(names: Sequence[str], log_format: str, *, shows_states: bool = True) -> Console:
    """A live one on a terminal, else a plain one, which `shows_states` or lines alone."""
    if sys.stderr.isatty() and log_format == "text":
        return LiveConsole(names)
    return PlainConsole(names, prefix=log_format == "text", shows_states=shows_states)
