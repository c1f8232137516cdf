"""Decoders of JSON, one for each type."""

import threading
from typing import Any

import msgspec

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_building = threading.Lock()


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """Of a type that msgspec takes. `msgspec.json.decode` and `convert` must not be the first to see a Struct: what
    msgspec knows of a class is kept with it before it is complete, and another thread that decodes with it meanwhile
    ends the process by a fault of memory (seen with 0.22).
    """
    found = _decoders.get(kind)
    if found is None:
        with _building:
            found = _decoders.get(kind)
            if found is None:
                found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found
