"""`--lora-modules`: which adapters are served, each by a name of its own."""

from collections.abc import Mapping
from pathlib import Path

from shared.errors import InvalidRequest
from shared.lora.adapter import LoraAdapter

LONGEST_NAME = 256
_FLAG = "--lora-modules"


def parse_modules(text: str) -> dict[str, Path]:
    """Folders by name, of `name=folder` separated by commas. Raises InvalidRequest."""
    found: dict[str, Path] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, folder = (piece.strip() for piece in part.partition("="))
        if not (separator and name and folder):
            raise _bad(f"{part!r} is not name=folder")
        if not is_name(name):
            raise _bad(f"a name has at most {LONGEST_NAME} characters, all of them printable")
        if name in found:
            raise _bad(f"{name!r} names two adapters")
        found[name] = Path(folder)
    return found


def is_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return 1 <= len(name) <= LONGEST_NAME and name.isprintable()


def open_modules(text: str, served_name: str, max_rank: int) -> Mapping[str, LoraAdapter]:
    """The adapters of `--lora-modules` by name. Raises InvalidRequest naming the adapter and what is wrong with it."""
    modules = parse_modules(text)
    if served_name in modules:
        raise _bad(f"{served_name!r} is the served model's own name")
    return {name: LoraAdapter.open(folder, max_rank) for name, folder in modules.items()}


def absolute(text: str) -> str:
    """The same with absolute folders. Raises InvalidRequest."""
    return ",".join(f"{name}={folder.absolute()}" for name, folder in parse_modules(text).items())


def _bad(what: str) -> InvalidRequest:
    return InvalidRequest("BAD_LORA_MODULES", f"{_FLAG}: {what}", field="lora_modules")
