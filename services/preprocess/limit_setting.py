"""The setting `--limit-mm-per-prompt`."""

import json
from collections.abc import Sequence

DEFAULT_LIMIT = 16
MODALITIES = ("image", "video")


def parse_limits(text: str) -> dict[str, int]:
    """Modality -> limit, of `image=16,video=2` or `{"image": 16, "video": 2}`; `16` is for each of both.

    What is not named has DEFAULT_LIMIT. Raises ValueError.
    """
    limits = dict.fromkeys(MODALITIES, DEFAULT_LIMIT)
    for name, value in _pairs(text.strip()):
        if name not in MODALITIES:
            raise ValueError(f"{name!r} has no limit: there are {' and '.join(MODALITIES)}")
        limits[name] = _count(name, value)
    return limits


def _pairs(text: str) -> Sequence[tuple[str, object]]:
    if text.startswith("{"):
        return list(json.loads(text).items())
    if "=" not in text:
        return [(name, text) for name in MODALITIES]
    pairs = [pair.partition("=") for pair in text.split(",")]
    return [(name.strip(), value) for name, _, value in pairs]


def _count(name: str, value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}: {value!r} is no number of items")
    return int(text)
