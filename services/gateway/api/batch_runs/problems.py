"""What is wrong with a batch or its lines, as it is kept with it."""

from collections.abc import Sequence

import msgspec

from shared.errors import ServingError


class Problem(msgspec.Struct, kw_only=True):
    """What is wrong with a line, or with a whole batch."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Problems(msgspec.Struct, kw_only=True):
    """The first of them."""

    object: str = "list"
    data: Sequence[Problem]


def problem_of(error: ServingError, line: int | None = None) -> Problem:
    """An error as a problem."""
    return Problem(
        code=error.reason.lower(),
        message=error.message,
        param=error.metadata.get("field"),
        line=line,
    )
