"""Files of a checkpoint, read within bounds: what a folder from elsewhere holds neither blocks a reader nor takes
gigabytes of memory. Standard library only.

Only regular files are read: a FIFO or a device would keep its reader waiting, or never end. JSON is bounded before it
is parsed, because a value takes many times the bytes that it is written with.
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# A configuration of transformers has some four levels.
MOST_DEPTH = 64
_KINDS = {
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
    stat.S_ISDIR: "a folder",
}
_NESTED = (dict, list)
# Endings of the names of files that readers here and libraries look for in a folder.
_READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".safetensors", ".bin")
_LARGE_JSON = ("tokenizer.json", "vocab.json")
_INDEX = ".index.json"
# What libraries parse; others of a folder, as the records of a training, may have any size.
_JSON = (
    *_LARGE_JSON,
    *("config.json", "generation_config.json", "adapter_config.json", "chat_template.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is read of a file at most. `values`: of JSON, strings, numbers, lists and objects together."""

    nbytes: int
    values: int


# Released ones: configurations to 1 MB, tokenizers to 35 MB and 2 million values, indexes and headers to 16 MB.
SMALL = Bounds(16 << 20, 1_000_000)
LARGE = Bounds(64 << 20, 4_000_000)


class OutOfBounds(ValueError):
    """A file that is not read; the message names it and the bound."""


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading. Raises OutOfBounds unless it is a regular one, at once, and OSError."""
    _require_regular(path, os.stat(path).st_mode)  # opening a device may have effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except OutOfBounds:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, bounds: Bounds = SMALL) -> bytes:
    """The whole file. Raises OutOfBounds or OSError."""
    with open_regular(path) as file:
        most = bounds.nbytes
        if os.fstat(file.fileno()).st_size <= most:
            data = file.read(most + 1) or b""  # the size of some files is not what they hold
            if len(data) <= most:
                return data
    raise OutOfBounds(
        f"{path} has more than {most >> 20} MiB, which is the most that is read of it"
    )


def read_text(path: Path, bounds: Bounds = SMALL) -> str:
    """The whole file, which must be UTF-8. Raises OutOfBounds, UnicodeDecodeError or OSError."""
    return read_bytes(path, bounds).decode("utf-8")


def read_value(path: Path, bounds: Bounds = SMALL) -> Any:
    """The value of a JSON file. Raises OutOfBounds, ValueError or OSError."""
    return parse(read_bytes(path, bounds), path, bounds)


def parse(data: bytes, path: Path, bounds: Bounds = SMALL) -> Any:
    """The value of JSON in UTF-8 that is (a part of) the file at `path`. Raises OutOfBounds or ValueError."""
    require_few(data, path, bounds)
    try:
        value = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise _too_deep(path) from None
    if _is_deep(value):
        raise _too_deep(path)
    return value


def require_bounded(folder: Path) -> None:
    """Raises OutOfBounds for the first of a folder's files that a library may read and that is out of bounds.

    For the libraries that read a folder themselves. What is no JSON at all is theirs to refuse.
    """
    for path in sorted(folder.iterdir()):
        if not path.name.endswith(_READ):
            continue
        try:
            _require_regular(path, path.stat().st_mode)
        except OSError:  # a link to nothing: no such file, to a library too
            continue
        if path.name in _JSON or path.name.endswith(_INDEX):
            _require_bounded_json(path)


def bounds_of(name: str) -> Bounds:
    """By the name of a JSON file."""
    return LARGE if name in _LARGE_JSON or name.endswith(_INDEX) else SMALL


def _require_bounded_json(path: Path) -> None:
    bounds = bounds_of(path.name)
    try:
        data = read_bytes(path, bounds)
        require_few(data, path, bounds)
        if data.count(b"[") + data.count(b"{") > MOST_DEPTH:
            parse(data, path, bounds)
    except OutOfBounds:
        raise
    except (OSError, ValueError):
        return


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "something else")
        raise OutOfBounds(f"{path} is {kind}, not a file")


def require_few(data: bytes, path: Path, bounds: Bounds) -> None:
    """Raises OutOfBounds for JSON of too many values, by the characters before values: there are no fewer."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > bounds.values:
        raise OutOfBounds(
            f"{path} has more than {bounds.values:,} JSON values, which is the most that is read of it"
        )


def _is_deep(value: Any) -> bool:
    level = [value] if type(value) in _NESTED else []
    for _ in range(MOST_DEPTH + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in _NESTED
        ]
        if not level:
            return False
    return True


def _too_deep(path: Path) -> OutOfBounds:
    return OutOfBounds(f"{path} is nested deeper than {MOST_DEPTH} levels of JSON")
