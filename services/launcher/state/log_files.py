"""The log of each process of a system, in files of bounded size, so that a request's lines can be found afterwards."""

import contextlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

# A process has one file of this size, and the one before it.
_MOST_BYTES = 8 << 20
_BEFORE = ".1"
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
# Begins of lines that are an event's own: everything else goes on with the line before.
_EVENT = re.compile(r"\{|\d\d:\d\d:\d\d\.\d+ \[")


class LogLine(NamedTuple):
    """A line, when the launcher had it (UTC), and which process wrote it."""

    at: str
    process: str
    text: str


class LogFiles:
    """Writes `NAME.log` for each process into a folder. A disk that is full costs the lines and nothing else."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files = {}

    def write(self, process: str, line: str) -> None:
        """A process has printed a line."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        try:
            file = self._files.get(process) or self._open(process)
            file.write(f"{now} {line}\n".encode(errors="replace"))
            if file.tell() > self._most_bytes:
                self._turn(process)
        except (OSError, ValueError):  # ValueError: it could not be opened again
            self._files.pop(process, None)

    def _open(self, process: str) -> BinaryIO:
        path = self._path(process)
        file = self._files[process] = path.open("ab", buffering=0)
        path.chmod(0o600)
        return file

    def _turn(self, process: str) -> None:
        self._files.pop(process).close()
        path = self._path(process)
        path.replace(path.with_name(path.name + _BEFORE))

    def _path(self, process: str) -> Path:
        return self._folder / f"{process}.log"


def lines_about(folder: Path, name: str) -> list[LogLine]:
    """The lines with a name (an id of a request) of all processes, and what goes on behind them, such as tracebacks, by
    time."""
    about = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
    found: list[LogLine] = []
    earlier = sorted(folder.glob(f"*.log{_BEFORE}"))
    for path in (*earlier, *sorted(folder.glob("*.log"))):
        process = path.name.removesuffix(_BEFORE).removesuffix(".log")
        is_about = False
        for at, text in _lines(path):
            if _EVENT.match(text):
                is_about = about.search(text) is not None
            if is_about:
                found.append(LogLine(at, process, text))
    return sorted(found, key=lambda line: line.at)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        for line in file:
            stamp = _STAMP.match(line)
            if stamp is not None:
                yield stamp[0].rstrip(), line[stamp.end() :].rstrip("\n")
