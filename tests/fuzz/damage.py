"""Right bodies made wrong: other values, places that are missing, bytes that are changed."""

import json
import random
from typing import Any

from tests.fuzz import forms, values

_REPEATED = 4096  # bytes


def object_in(draw: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    """The body itself, or an object within it."""
    found, place = content, content
    while draw.random() < 0.6:
        inner: Any = list(place.values() if isinstance(place, dict) else place)
        inner = [one for one in inner if isinstance(one, dict | list) and one]
        if not inner:
            break
        place = draw.choice(inner)
        found = place if isinstance(place, dict) else found
    return found


def any_field(draw: random.Random) -> Any:
    """What may be wrong for a field, or is what a field of another route takes."""
    kind = draw.random()
    if kind < 0.1:
        return draw.choice([*forms.MAKERS.values()])(draw)
    if kind < 0.15:
        return forms.json_text(draw)
    return values.any_value(draw)


def break_inside(draw: random.Random, content: dict[str, Any]) -> None:
    """Puts something wrong in a random place of the tree, or takes one away."""
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(place[key], dict | list) and draw.random() < 0.7:
            place = place[key]
            continue
        if isinstance(place, dict) and draw.random() < 0.3:
            del place[key]
        else:
            place[key] = any_field(draw)
        return


def as_json(content: Any) -> bytes:
    """As JSON; what is too deep for the library is written by hand."""
    try:
        return json.dumps(content).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def damaged(draw: random.Random, written: bytes) -> bytes:
    """Some bytes changed, cut off or repeated."""
    changed = bytearray(written)
    for _ in range(draw.randint(1, 5)):
        if not changed:
            break
        at = draw.randrange(len(changed))
        change = draw.random()
        if change < 0.6:
            changed[at] = draw.randrange(256)
        elif change < 0.8:
            del changed[at : at + draw.randint(1, 64)]
        else:
            changed[at:at] = changed[at : at + _REPEATED]
    return bytes(changed)
