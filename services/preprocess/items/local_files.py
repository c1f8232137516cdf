"""Media that are files of this machine, below one folder that the operator permits."""

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shared.errors import InvalidRequest, Precondition

_FLAG = "--allowed-local-media-path"
_SCHEME = "file:"
# Neither a link put into the path meanwhile, nor a named pipe that would wait for its writer.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def is_file_url(url: str) -> bool:
    """Whether a URL names a file of this machine."""
    return url[: len(_SCHEME)].lower() == _SCHEME


class LocalFiles:
    """Reads files below `folder`; without a folder none."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises Precondition if it is no folder."""
        self._folder: Path | None = None
        if folder is None:
            return
        try:
            self._folder = folder.resolve(strict=True)
        except OSError as error:
            raise Precondition("LOCAL_MEDIA", f"{_FLAG} {folder}: {error}") from error
        if not self._folder.is_dir():
            raise Precondition("LOCAL_MEDIA", f"{_FLAG} {folder} is no folder")

    def read(self, url: str, most_bytes: int) -> bytes:
        """The bytes of the file that a file: URL names; blocks. Links are followed where they stay below the folder.

        Raises InvalidRequest, in the same words for what does not exist and for what lies elsewhere.
        """
        if self._folder is None:
            raise InvalidRequest(
                "LOCAL_MEDIA_OFF",
                f"files of this machine are not taken here ({_FLAG}): send the file as a data: URL",
            )
        path = _path(url)
        try:
            within = path.resolve(strict=True).relative_to(self._folder)
            return _read(self._folder, within.parts, most_bytes)
        except (OSError, ValueError, RuntimeError):
            raise InvalidRequest(
                "LOCAL_MEDIA",
                f"there is no file that can be read below the folder of {_FLAG} at this path",
            ) from None


def _path(url: str) -> Path:
    """Raises InvalidRequest for a URL of another machine's file, or of none."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidRequest("MEDIA_URL", "this is no URL") from None
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise InvalidRequest(
            "MEDIA_URL", "a file: URL has an absolute path of this machine: file:///a/b.png"
        )
    return Path(path)


def _read(folder: Path, names: tuple[str, ...], most_bytes: int) -> bytes:
    """The file at resolved `names` below the folder. Raises OSError, InvalidRequest."""
    at = os.open(folder, _OPEN | os.O_DIRECTORY)
    try:
        for index, name in enumerate(names):
            flags = _OPEN if index == len(names) - 1 else _OPEN | os.O_DIRECTORY
            below = os.open(name, flags, dir_fd=at)
            os.close(at)
            at = below
        found = os.fstat(at)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("no regular file")
        if found.st_size > most_bytes:
            raise InvalidRequest(
                "MEDIA_TOO_LARGE", f"the file has {found.st_size} bytes, the limit is {most_bytes}"
            )
        with os.fdopen(os.dup(at), "rb") as file:
            return file.read(most_bytes + 1)
    finally:
        os.close(at)
