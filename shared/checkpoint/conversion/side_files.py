"""The files of a checkpoint folder that hold no weights, on their way to another folder."""

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from shared.errors import InvalidRequest

_LARGEST = 1 << 30  # bytes


def side_files(folder: Path, weights: Collection[str]) -> list[Path]:
    """All files below `folder` but those named in `weights`, as paths relative to it, sorted.

    Raises InvalidRequest for one of more than 1 GiB, and for a link that leads out of the folder or to a folder.
    """
    found = []
    for path in _below(folder):
        relative = path.relative_to(folder)
        if path.is_symlink():
            _require_inside(folder, path)
        if str(relative) in weights:
            continue
        if path.stat().st_size > _LARGEST:
            raise InvalidRequest(
                "SIDE_FILE_TOO_LARGE",
                f"{path} is no part of the weights and has more than 1 GiB: move it elsewhere",
            )
        found.append(relative)
    return sorted(found)


def copy_side_files(folder: Path, files: Collection[Path], destination: Path) -> None:
    """Copies contents and times of change; a link becomes what it leads to."""
    for relative in files:
        target = destination / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / relative, target)


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        for name in folders:
            if (Path(parent) / name).is_symlink():
                _require_inside(folder, Path(parent) / name)
        yield from (Path(parent) / name for name in files)


def _require_inside(folder: Path, link: Path) -> None:
    target = link.resolve()
    if not target.is_relative_to(folder.resolve()):
        raise InvalidRequest(
            "LINK_LEAVES_FOLDER",
            f"{link} leads out of the folder, to {target}: copy the folder with `cp -rL` first",
        )
    if not target.is_file():
        raise InvalidRequest("BAD_LINK", f"{link} leads to {target}, which is no file")
