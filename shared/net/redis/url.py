"""The URL of Redis: with the password from a file for the client, without any for logs."""

from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit

from shared.errors import InvalidRequest
from shared.net import secret_files

_FLAG = "--redis-password-file"


def with_password(url: str, file: Path | None) -> str:
    """The URL with the password of the file; as it is without a file.

    Raises InvalidRequest if the file cannot be read, or the URL has a password already.
    """
    if file is None:
        return url
    split = urlsplit(url)
    if split.password:
        raise InvalidRequest(
            "TWO_PASSWORDS",
            f"--redis-url holds a password and {_FLAG} names another: leave one of them out",
            field="redis_url",
        )
    secret_files.warn_if_open(file, _FLAG)
    password = quote(secret_files.read_one(file, _FLAG), safe="")
    user, at, where = split.netloc.rpartition("@")
    return _join(split, f"{user if at else ''}:{password}@{where}", split.query)


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    split = urlsplit(url)
    _, at, where = split.netloc.rpartition("@")
    query = "&".join(part for part in split.query.split("&") if not part.startswith("password="))
    return _join(split, f"***@{where}" if at else where, query)


def _join(split: SplitResult, place: str, query: str) -> str:
    # The library's own drops the slashes of unix:///path.
    return f"{split.scheme}://{place}{split.path}{'?' if query else ''}{query}"
