"""A field that holds an object of JSON, which is handed on as text."""

import json

import msgspec

from services.gateway.decoding.bounds import wrong


def object_text(field: str, raw: msgspec.Raw, longest: int) -> str:
    """The object as JSON; empty where there is none, or nothing in it. Raises InvalidRequest naming the field."""
    given = bytes(raw)
    if given in (b"", b"null"):
        return ""
    if len(given) > longest:
        raise wrong(field, f"must not be longer than {longest} bytes as JSON")
    if not given.startswith(b"{"):
        raise wrong(field, "must be an object", "INVALID_TYPE")
    try:
        found = json.loads(given.decode())
        return json.dumps(found, allow_nan=False) if found else ""
    except (ValueError, RecursionError) as error:  # also NaN and numbers beyond all bounds
        raise wrong(field, f"cannot be passed on: {error}") from None
