"""A folder that appears when it is complete."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import InvalidRequest


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write to; it becomes `path` at the end, and is removed after an error.

    Raises InvalidRequest if there is something at `path` already, other than an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidRequest("NOT_EMPTY", f"{path} exists already and is no empty folder")
    part = path.with_name(path.name + ".part")
    if part.exists():
        raise InvalidRequest(
            "NOT_EMPTY", f"{part} exists: of a run that goes on, or remove what one has left"
        )
    part.mkdir(parents=True)
    try:
        yield part
        part.replace(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
