"""Errors of what all APIs share, about fields as an API with other names for them calls them."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from shared.errors import ServingError

_ROOT = re.compile(r"[^.\[]*")


class Renamed(NamedTuple):
    """An error's message and its field, which is empty where it is about none."""

    message: str
    field: str


def renamed(error: ServingError, names: Mapping[str, str]) -> Renamed:
    """`names`: the API's, by those of OpenAI's chats."""
    field = error.metadata.get("field", "")
    found = _ROOT.match(field)
    root = found[0] if found is not None else ""
    # A body's own fields that are not taken have its names already.
    if root not in names or error.reason == "UNSUPPORTED_PARAMETER":
        return Renamed(error.message, field)
    message = error.message
    if message.startswith(root):
        message = names[root] + message.removeprefix(root)
    return Renamed(message, names[root] + field.removeprefix(root))
