"""API keys: reading those that were given, and refusing an address that others can reach without any."""

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

from shared.errors import InvalidRequest
from shared.net import secret_files

_KEY = re.compile(
    r"[!-+\--~]+"
)  # printable ASCII but for spaces and commas, as an HTTP header carries it
_FILE_FLAG = "--api-key-file"


def given_keys(listed: str | None, file: Path | None) -> tuple[str, ...]:
    """The keys of `--api-key` (separated by commas) and of the file (one a line); none if neither was given.

    Raises InvalidRequest where keys were asked for and there is none, or one that no client could send.
    """
    keys: tuple[str, ...] = ()
    if listed is not None:
        keys = parts(listed)
        if not keys:
            raise InvalidRequest(
                "NO_API_KEY",
                "--api-key was given and holds no key: give at least one, or leave it out",
                field="api_key",
            )
    if file is not None:
        keys += secret_files.read_lines(file, _FILE_FLAG)
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):  # the key itself is not repeated
            raise InvalidRequest(
                "BAD_API_KEY",
                f"API key {number} of {len(keys)} cannot be sent in a header: a key is printable ASCII without spaces "
                f"and commas ({_FILE_FLAG} has one a line)",
                field="api_key",
            )
    return tuple(dict.fromkeys(keys))


def client_key(given: str | None, file: Path | None) -> str:
    """The key that a client sends: the first of the file, else the one given; empty for none.

    Raises InvalidRequest if the file cannot be read or holds none.
    """
    return secret_files.read_lines(file, _FILE_FLAG)[0] if file is not None else given or ""


def warn_of_open_key_file(file: Path | None) -> None:
    """Logs a warning if others may read or change the file of keys."""
    if file is not None:
        secret_files.warn_if_open(file, _FILE_FLAG)


def require_keys_or_loopback(
    keys: Iterable[str], address: str, *, allow_unauthenticated: bool
) -> None:
    """Raises InvalidRequest where other machines could reach an API at `address` without a key."""
    if any(keys) or allow_unauthenticated or is_loopback(address):
        return
    raise InvalidRequest(
        "UNAUTHENTICATED",
        f"no API key is set, and {address or 'every address'} can be reached from other machines: set a key"
        f" (environment TESSERA_API_KEY, or {_FILE_FLAG} FILE), or say --allow-unauthenticated if everybody who"
        " reaches it may use it",
        field="host",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on the address. An empty host is every address; of names only
    `localhost` counts.
    """
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def parts(listed: str) -> tuple[str, ...]:
    """The pieces between commas, trimmed, without empty ones."""
    return tuple(part for piece in listed.split(",") if (part := piece.strip()))
