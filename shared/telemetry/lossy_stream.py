"""A text stream that drops what it cannot write: a full disk or a closed pipe under the log stops no service."""

import contextlib
import io
from typing import TextIO


class LossyStream(io.TextIOBase):
    """Writes through to another stream, and drops what that refuses (OSError)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes it, or not; its length either way."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes out what is buffered, if that works."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether the other one is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """That of the other one."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the other one."""
        return self._stream.encoding
