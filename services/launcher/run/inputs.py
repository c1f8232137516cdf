"""Which pictures are asked about, and what."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PICTURES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


class InputError(ValueError):
    """Inputs that cannot be used; the message is for users."""


@dataclass(frozen=True, slots=True)
class Input:
    """A picture, a text, and the name of the adapter that answers; an empty one is not given."""

    image: Path
    text: str
    adapter: str = ""


def read_inputs(images: Sequence[Path], texts: str, pairs: str) -> list[Input]:
    """Those of `--input-dict` if it is given, else each picture with its text. Raises InputError."""
    if pairs:
        if images:
            raise InputError("--input-dict names the pictures itself: leave the others away")
        return [_pair(entry, index) for index, entry in enumerate(_listed(pairs, "--input-dict"))]
    files = [file for path in images for file in _files(path.expanduser())]
    if not files:
        raise InputError("no picture was given: name files or folders of pictures")
    return [Input(file, text) for file, text in zip(files, _texts(texts, len(files)), strict=True)]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix.lower() in _PICTURES)
        if not found:
            raise InputError(f"there is no picture in {path}: {', '.join(sorted(_PICTURES))}")
        return found
    if not path.is_file():
        raise InputError(f"there is no file {path} (commas separate paths: name a folder instead)")
    return [path]


def _texts(given: str, count: int) -> list[str]:
    texts = _read_texts(given)
    if len(texts) > count:
        raise InputError(
            f"input_text length must equal input_images length: there are {len(texts)} texts for {count} pictures"
        )
    if not texts:
        raise InputError("--input-texts: there is no text")
    return [*texts, *[texts[-1]] * (count - len(texts))]


def _read_texts(given: str) -> list[str]:
    path = _path(given)
    if given.lstrip().startswith("[") or (path is not None and path.suffix == ".json"):
        texts = _listed(given, "--input-texts")
        if not all(isinstance(text, str) for text in texts):
            raise InputError("--input-texts must be a JSON list of texts")
        return texts
    return [given] if path is None else _read(path).splitlines()


def _pair(entry: Any, index: int) -> Input:
    where = f"--input-dict[{index}]"
    if not isinstance(entry, dict) or entry.keys() - {"image", "prompt", "adapter"}:
        raise InputError(
            f'{where} must be {{"image": ..., "prompt": ...}}, perhaps with an adapter'
        )
    image, text, adapter = entry.get("image"), entry.get("prompt"), entry.get("adapter") or ""
    if not isinstance(image, str) or not isinstance(text, str):
        raise InputError(f"{where} must have an image, the path of a file, and a prompt")
    if not isinstance(adapter, str):
        raise InputError(f"{where}: adapter must be a name")
    path = Path(image).expanduser()
    if not path.is_file():
        raise InputError(f"{where}: there is no file {path}")
    return Input(path, text, adapter)


def _listed(given: str, flag: str) -> list[Any]:
    """A JSON list, or that of a file."""
    path = _path(given)
    try:
        found = json.loads(given if path is None else _read(path))
    except ValueError as error:
        raise InputError(f"{flag} is neither a file nor JSON: {error}") from None
    if not isinstance(found, list):
        raise InputError(f"{flag} must be a JSON list")
    return found


def _path(given: str) -> Path | None:
    """The file that is meant, if one is."""
    try:
        return path if (path := Path(given).expanduser()).is_file() else None
    except (OSError, ValueError):  # a text that no path can be
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
