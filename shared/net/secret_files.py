"""Files that hold secrets: API keys, the token of the internal services, Redis' password."""

import stat
from pathlib import Path

import structlog

from shared.errors import InvalidRequest

log = structlog.get_logger(__name__)

# A group may read: that is how containers share a file between two users.
_TOO_OPEN = stat.S_IRWXO | stat.S_IWGRP
_MOST_BYTES = 1 << 20


def read_lines(path: Path, flag: str) -> tuple[str, ...]:
    """The lines of a file, trimmed, without empty ones and comments (`#`). `flag` is what named it.

    Raises InvalidRequest if it cannot be read, is no text, is larger than 1 MiB, or holds nothing.
    """
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _bad(flag, f"cannot read {path}: {error.strerror or error}") from None
    if len(content) > _MOST_BYTES:
        raise _bad(flag, f"{path} is larger than {_MOST_BYTES} bytes")
    try:
        stripped = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        raise _bad(flag, f"{path} is not text in UTF-8") from None
    lines = tuple(line for line in stripped if line and not line.startswith("#"))
    if not lines:
        raise _bad(flag, f"{path} holds nothing but empty lines and comments")
    return lines


def read_one(path: Path, flag: str) -> str:
    """The only line. Raises InvalidRequest, also if there are several."""
    first, *others = read_lines(path, flag)
    if others:
        raise _bad(flag, f"{path} has {1 + len(others)} lines where one is expected")
    return first


def warn_if_open(path: Path, flag: str) -> None:
    """Logs a warning if users who do not own the file may read or change it."""
    try:
        mode = path.expanduser().stat().st_mode & 0o777
    except OSError:
        return  # who reads it says so
    if mode & _TOO_OPEN:
        log.warning(f"the file of {flag} is open to others: chmod 600 {path}", mode=f"{mode:04o}")


def _bad(flag: str, fault: str) -> InvalidRequest:
    return InvalidRequest("BAD_SECRET_FILE", f"{flag}: {fault}", field=flag.removeprefix("--"))
