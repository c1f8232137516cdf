"""What comparisons have found, kept in files, so that a model is compared once and not at every start.

A file's name is a digest of all that a comparison depends on: the checkpoint's files but its weights, which are not
read, how it is asked for, the code here and of all installed packages, and the processor's instructions. A file that
cannot be read or written is none: the comparison runs again.
"""

import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from services.families import registry
from shared.checkpoint.folder import Checkpoint
from shared.cpu_kernels import choice
from shared.settings import (
    cache_home,
    cpu_arithmetic_is_portable,
    cpu_instructions,
    cpu_trial_folder,
)

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")
_DIGEST_BYTES = 16
_LARGE = (
    64 << 20
)  # of larger files the size and the time of their last change stand for the content
_CODE = (".py", ".cpp", ".h")
_MOST_FILES = 256
_ROOT = Path(__file__).parents[2]
_FOLDER = "{folder}"  # in messages: of another copy of the same files the verdict is the same


@dataclass(frozen=True)
class Verdict:
    """Why a checkpoint is refused; two empty texts: it is not."""

    reason: str = ""
    message: str = ""


class Verdicts:
    """Of one checkpoint, asked for in one way. Safe for several processes at once."""

    def __init__(self, checkpoint: Checkpoint, *options: str) -> None:
        """`options`: how it is asked for."""
        self._folder = checkpoint.folder.absolute()
        self._options = (checkpoint.family, *options)
        self._file = self._find()

    def read(self) -> Verdict | None:
        """What was found before; None where nothing was."""
        try:
            assert self._file is not None
            found = json.loads(self._file.read_text(encoding="utf-8"))
            reason, message = found["reason"], found["message"]
        except (AssertionError, OSError, ValueError, TypeError, KeyError):
            return None
        if not isinstance(reason, str) or not isinstance(message, str):
            return None
        return Verdict(reason, message.replace(_FOLDER, str(self._folder)))

    def write(self, verdict: Verdict) -> None:
        """Keeps it, unless a file has changed since this object was made, or nothing can be written."""
        file = self._file
        if file is None or self._find() != file:
            return
        said = verdict.message.replace(str(self._folder), _FOLDER)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            _replace(file, json.dumps({"reason": verdict.reason, "message": said}))
            _forget_oldest(file.parent)

    def _find(self) -> Path | None:
        try:
            digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            for part in self._parts():
                digest.update(hashlib.blake2b(part, digest_size=_DIGEST_BYTES).digest())
            return cache_home() / "tessera" / "comparisons" / f"{digest.hexdigest()}.json"
        except (OSError, RuntimeError):  # a folder that cannot be read, a user without a home
            return None

    def _parts(self) -> Iterator[bytes]:
        for option in self._options:
            yield option.encode()
        yield f"{sys.version} {platform.machine()} {cpu_instructions()} {cpu_arithmetic_is_portable()}".encode()
        yield repr(_kernels()).encode()
        yield repr(_installed()).encode()
        for folder in (_ROOT / "services", _ROOT / "shared", *_brought()):
            yield from _contents(folder, [f for f in folder.rglob("*") if f.suffix in _CODE])
        own = [f for f in self._folder.iterdir() if f.is_file() and not f.name.endswith(WEIGHTS)]
        yield from _contents(self._folder, own)


def _contents(folder: Path, files: list[Path]) -> Iterator[bytes]:
    for file in sorted(files):
        yield str(file.relative_to(folder)).encode()
        status = file.stat()
        if status.st_size > _LARGE:
            yield f"{status.st_size} {status.st_mtime_ns}".encode()
        else:
            yield file.read_bytes()


def _kernels() -> list[str]:
    """The set of CPU kernels that a comparison computes with here; none if torch does."""
    with suppress(ValueError):  # a set that there is not: the comparison says so
        portable = cpu_arithmetic_is_portable()
        chosen = choice.choose(
            cpu_instructions(), cpu_trial_folder(), may_compile=False, portable=portable
        )
        return [known.name for known in chosen.sets[:1]]
    return []


def _installed() -> list[str]:
    """Names and versions of all installed packages."""
    folders = {path for path in map(Path, sys.path) if path.is_dir()}
    return sorted(found.name for folder in folders for found in folder.glob("*.dist-info"))


def _brought() -> list[Path]:
    """The folders of packages that bring families."""
    found = []
    for point in entry_points(group=registry.GROUP):
        with suppress(ImportError, ValueError):
            spec = find_spec(point.module.partition(".")[0])
            found += [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return sorted(set(found))


def _replace(file: Path, content: str) -> None:
    """Whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as made:
            made.write(content)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    for file in files[:-_MOST_FILES]:
        file.unlink(missing_ok=True)
