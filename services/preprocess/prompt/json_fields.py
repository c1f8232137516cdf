"""JSON that chat templates are given, within limits."""

import json
import re
from typing import Any

from shared.errors import InvalidRequest

# What is nested deeper than this overflows stacks, and its text form grows with each level.
_MOST_DEPTH = 32
_MOST_CHARACTERS = {"chat_template_kwargs": 1 << 16, "documents": 1 << 20}
_MOST_OTHERS = 1 << 19
# A string as a whole (or what is left of the text, where it does not end), or a bracket.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|$)|[\[\]{}]', re.DOTALL)


def read_json(text: str, field: str) -> Any:
    """What a template is given. Raises InvalidRequest."""
    most = _MOST_CHARACTERS.get(field, _MOST_OTHERS)
    if len(text) > most:
        raise bad_json(field, f"has {len(text)} characters of JSON, the limit is {most}")
    if _depth(text) > _MOST_DEPTH:
        raise bad_json(field, f"is nested deeper than {_MOST_DEPTH} levels")
    try:
        return json.loads(text)
    except ValueError as error:
        raise bad_json(field, f"is not JSON: {error}") from error


def bad_json(field: str, message: str) -> InvalidRequest:
    """The error about a field of JSON."""
    return InvalidRequest("BAD_JSON", f"{field} {message}", field=field)


def _depth(text: str) -> int:
    """How deep the brackets of a JSON text nest at most; those in strings do not count."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in "]}":
            depth -= 1
    return deepest
