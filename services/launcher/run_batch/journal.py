"""What has been answered so far, in a file beside the output: a run that was interrupted goes on from it."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.environment import random_hex

_BEGIN = b"run"


class JournalError(Exception):
    """A journal that cannot be used; the message is for users."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where the result of a line stands; `digest` is that of the line."""

    digest: str
    start: int
    size: int


class Journal:
    """One record a line: the number of a line of the input, its digest, and its result. `with` closes it."""

    def __init__(self, path: Path) -> None:
        """Raises JournalError where another run writes it, or where it is something else."""
        self._path = path
        self._entries: dict[int, _Entry] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.run = self._read()
        except BlockingIOError:
            self.close()
            raise JournalError(f"another run writes {path}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, line: int, digest: str) -> bool:
        """Whether there is a result of this line, as it is now."""
        found = self._entries.get(line)
        return found is not None and found.digest == digest

    def add(self, line: int, digest: str, result: bytes) -> None:
        """Writes a result, which has no line end."""
        head = b"%d %s " % (line, digest.encode())
        start = self._size + len(head)
        self._write(head + result + b"\n")
        self._entries[line] = _Entry(digest, start, len(result))

    def result(self, line: int) -> bytes:
        """The result of a line that has one."""
        found = self._entries[line]
        return os.pread(self._file, found.size, found.start)

    def close(self) -> None:
        """Another run may use it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        """All of it stands elsewhere."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        """Reads what is there, cuts off a record that is not whole, and returns the name of the run."""
        self._size = 0
        run = ""
        with os.fdopen(os.dup(self._file), "rb") as records:
            for record in records:
                if not record.endswith(b"\n"):
                    break
                first, _, rest = record.partition(b" ")
                if not run and first == _BEGIN:
                    run = rest.decode().strip()
                elif run and first.isdigit():
                    digest, _, result = rest.partition(b" ")
                    start = self._size + len(record) - len(result)
                    entry = _Entry(digest.decode(), start, len(result) - 1)
                    self._entries[int(first)] = entry
                else:
                    raise JournalError(f"{self._path} is no journal of a run: move it away")
                self._size += len(record)
        os.ftruncate(self._file, self._size)
        if not run:
            run = random_hex(8)
            self._write(b"%s %s\n" % (_BEGIN, run.encode()))
        return run

    def _write(self, record: bytes) -> None:
        """Raises JournalError where the disk is full."""
        try:
            written = os.write(self._file, record)
            while written < len(record):
                written += os.write(self._file, record[written:])
        except OSError as error:
            raise JournalError(f"cannot write {self._path}: {error.strerror}") from error
        self._size += len(record)
