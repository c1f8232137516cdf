"""The calls in an assistant's earlier turns, as chat templates are given them."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

from services.gateway.decoding.bounds import at_most, text, wrong
from services.gateway.decoding.list_limits import LONGEST_TOOL_NAME, LONGEST_TOOLS, MOST_CALLS

_LONGEST_ID = 256


class Called(NamedTuple):
    """One call: its name, the tool's, and the text of its arguments."""

    id: str | None
    tool: str | None
    arguments: str


def read_calls(calls: Iterable[Called], path: str) -> str:
    """The calls at `path` as a JSON list, empty for none. Arguments that are the text of a JSON object become that
    object; others stay text. Raises InvalidRequest naming the field.
    """
    written = []
    for index, call in enumerate(calls):
        at_most(path, index + 1, MOST_CALLS)
        where = f"{path}[{index}]"
        if not call.tool:
            raise wrong(f"{where}.function.name", "is missing")
        name = text(f"{where}.function.name", call.tool, LONGEST_TOOL_NAME)
        function = {"name": name, "arguments": _arguments(call.arguments)}
        written.append({"type": "function", "function": function})
        if call.id:
            written[-1]["id"] = read_call_id(call.id, f"{where}.id")
    if not written:
        return ""
    listed = json.dumps(written, ensure_ascii=False)
    if len(listed) > LONGEST_TOOLS:
        raise wrong(path, f"must not be longer than {LONGEST_TOOLS} characters as JSON")
    return listed


def read_call_id(call_id: str | None, path: str) -> str:
    """The name of a call; empty for None. Raises InvalidRequest."""
    return text(path, call_id, _LONGEST_ID)


def _arguments(given: str) -> Any:
    if not given:
        return {}
    try:
        value = json.loads(given, parse_constant=_refuse)
        # Not a number beyond all bounds, nor half of a surrogate pair.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
