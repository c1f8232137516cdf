"""Which file is the vision part of a language model: by its name, or by what it says."""

from collections.abc import Sequence
from pathlib import Path

from shared.checkpoint.gguf.header import read_header
from shared.checkpoint.gguf.vision.kinds import ARCHITECTURE
from shared.errors import InvalidRequest

NONE = "none"  # of `--mmproj`: the model answers to text alone
_NAMED = "mmproj"
_SUFFIX = ".gguf"
_SHOWN = 5


def files_of(folder: Path) -> list[Path]:
    """The GGUF files of a folder, by their names."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() == _SUFFIX)


def is_named_so(path: Path) -> bool:
    """Whether a file has the name of a vision part, as llama.cpp's converter and the hub's repositories give it."""
    return _NAMED in path.name.lower()


def says_so(path: Path) -> bool:
    """Whether a file says that it is a vision part; False for one that cannot be read."""
    try:
        return read_header(path).metadata.get("general.architecture") == ARCHITECTURE
    except InvalidRequest:
        return False


def find_projector(file: Path, folder: Path | None, given: str) -> Path | None:
    """The vision part of the language model `file`: what `--mmproj` names, by a path or as a file beside it, else the
    only one beside it; None for text alone. folder: where both are known to belong together.

    Raises InvalidRequest if there is no such file, or if there are several.
    """
    if given == NONE:
        return None
    if given:
        found = [path for path in (Path(given), file.parent / given) if path.is_file()]
        if not found:
            raise InvalidRequest(
                "NO_MODEL", f"--mmproj: no file {given}, nor one in {file.parent}", field="mmproj"
            )
        return found[0]
    beside = [path for path in files_of(folder or file.parent) if path != file]
    found = [path for path in beside if is_named_so(path) or (folder and says_so(path))]
    if len(found) > 1:
        raise InvalidRequest(
            "NO_MODEL",
            f"{file.parent} has several vision parts, {shown(found)}: --mmproj NAME says which is meant, --mmproj none"
            " answers to text alone",
            field="mmproj",
        )
    return found[0] if found else None


def shown(paths: Sequence[Path]) -> str:
    """The names of some files."""
    names = ", ".join(path.name for path in paths[:_SHOWN])
    return names + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
