"""What a child answers its parent, in a file of its own: to standard output libraries print too, some when imported."""

import os
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Self


class AnswerFile:
    """A file without a name for the answer of one child.

    The child inherits the descriptor (`pass_fds` of subprocess), gets its number as an argument, and calls
    `write_answer`. What the child prints is no part of the answer.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it."""
        self._file.close()

    @property
    def number(self) -> int:
        """Of the descriptor, in this process and in the child."""
        return self._file.fileno()

    @property
    def pass_fds(self) -> Sequence[int]:
        """What the child inherits."""
        return (self.number,)

    def read(self) -> str:
        """The answer, once the child has ended; empty where it gave none."""
        self._file.seek(0)
        return self._file.read().decode(errors="replace")


def write_answer(number: int, text: str) -> None:
    """Gives the parent's `AnswerFile` of this number its answer. Once in a process."""
    with os.fdopen(number, "wb") as file:
        file.write(text.encode())
