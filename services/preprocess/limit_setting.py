"""The setting `--limit-mm-per-prompt`."""

import json
from collections.abc import Sequence

DEFAULT_LIMIT = 16


def parse_limits(text: str) -> dict[str, int]:
    """Modality -> limit, of `image=16,video=2` or `{"image": 16, "video": 2}`; `16` is for each.

    What is not named has DEFAULT_LIMIT. Raises ValueError.
    """
    # Imported where it is needed: the settings are read before protos are compiled too.
    from shared.prompts.modality import NAMES

    names = tuple(NAMES.values())
    limits = dict.fromkeys(names, DEFAULT_LIMIT)
    for name, value in _pairs(text.strip(), names):
        if name not in limits:
            raise ValueError(f"{name!r} has no limit: there are {' and '.join(names)}")
        limits[name] = _count(name, value)
    return limits


def _pairs(text: str, names: Sequence[str]) -> Sequence[tuple[str, object]]:
    if text.startswith("{"):
        return list(json.loads(text).items())
    if "=" not in text:
        return [(name, text) for name in names]
    pairs = [pair.partition("=") for pair in text.split(",")]
    return [(name.strip(), value) for name, _, value in pairs]


def _count(name: str, value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}: {value!r} is no number of items")
    return int(text)
