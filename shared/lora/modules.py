"""Which adapters are served from the start, each by a name of its own: those of `--lora-modules`, and those that the
model's folder names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import InvalidRequest
from shared.lora.adapter import LoraAdapter
from shared.lora.adapter_file import read_adapter_file

# What requests call the model without any adapter, as MindIE-LLM does.
BASE = "base"
LONGEST_NAME = 256
_FLAG = "--lora-modules"


@dataclass(frozen=True, slots=True)
class Modules:
    """adapters: by name. own: names of the model as it is, whose partial LoRA its own folder has. default: the name
    that answers where a request names the model; empty is the model itself."""

    adapters: Mapping[str, LoraAdapter]
    own: tuple[str, ...]
    default: str


def parse_modules(text: str) -> dict[str, Path]:
    """Folders by name, of `name=folder` separated by commas. Raises InvalidRequest."""
    found: dict[str, Path] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, folder = (piece.strip() for piece in part.partition("="))
        if not (separator and name and folder):
            raise _bad(f"{part!r} is not name=folder")
        _check_name(name, _FLAG)
        if name in found:
            raise _bad(f"{name!r} names two adapters")
        found[name] = Path(folder)
    return found


def is_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return 1 <= len(name) <= LONGEST_NAME and name.isprintable()


def open_modules(
    text: str, served_name: str, max_rank: int, folder: Path, default: str = ""
) -> Modules:
    """The adapters of `--lora-modules`, and those of `lora_adapter.json` in the model's folder that have other names.
    `default`: `--lora-adapter-id`; unless it is given, the only one that the file names.

    Raises InvalidRequest naming the adapter and what is wrong with it."""
    given = parse_modules(text)
    listed = read_adapter_file(folder)
    for name in listed.folders:
        _check_name(name, str(listed.path))
    for source, names in ((_FLAG, given), (str(listed.path), listed.folders)):
        if served_name in names:
            raise _bad(f"{served_name!r} is the served model's own name", source)
    adapters = {name: LoraAdapter.open(path, max_rank) for name, path in given.items()}
    own = []
    for name, path in listed.folders.items():
        if name in given:
            continue
        if listed.is_own(name):
            own.append(name)
            continue
        try:
            adapters[name] = LoraAdapter.open(path, max_rank)
        except InvalidRequest as error:
            raise _bad(f"{name!r}: {error.message}", str(listed.path)) from error
    return Modules(adapters, tuple(own), _default(default, (*adapters, *own), [*listed.folders]))


def absolute(text: str) -> str:
    """The same with absolute folders. Raises InvalidRequest."""
    return ",".join(f"{name}={folder.absolute()}" for name, folder in parse_modules(text).items())


def _default(given: str, names: tuple[str, ...], listed: list[str]) -> str:
    if not given:
        return listed[0] if len(listed) == 1 else ""
    if given == BASE:
        return ""
    if given not in names:
        known = ", ".join(map(repr, (BASE, *names)))
        raise _bad(f"there is no adapter {given!r} at the start, only {known}", "--lora-adapter-id")
    return given


def _check_name(name: str, source: str) -> None:
    if not is_name(name):
        raise _bad(f"a name has 1 to {LONGEST_NAME} characters, all of them printable", source)
    if name == BASE:
        raise _bad(f"{BASE!r} is the model itself, and no adapter's name", source)


def _bad(what: str, source: str = _FLAG) -> InvalidRequest:
    return InvalidRequest("BAD_LORA_MODULES", f"{source}: {what}", field="lora_modules")
