"""Tools, under OpenAI's newer and older names. The model's chat template shows them to the model; that the model calls
them is not offered yet, so they are taken with `tool_choice: "none"` alone.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway.decoding.bounds import text, wrong
from services.gateway.decoding.list_limits import LONGEST_TOOL_NAME, LONGEST_TOOLS
from services.gateway.reading.unsupported import UnsupportedFields, is_off, unsupported
from shared.errors import InvalidRequest

_NONE = msgspec.Raw()


class ToolFields(UnsupportedFields, kw_only=True):
    """The fields, as unread JSON; empty where a body does not have them."""

    tools: msgspec.Raw = _NONE
    tool_choice: msgspec.Raw = _NONE
    functions: msgspec.Raw = _NONE
    function_call: msgspec.Raw = _NONE


def read_tools(body: ToolFields, *, may_call: bool = True) -> str:
    """The tools as a JSON list of {"type": "function", "function": {...}}, as the client wrote them; empty for none.
    `may_call`: whether what the request gets could be a call.

    Raises InvalidRequest naming the field: for a call that is asked for, and for tools of another shape.
    """
    _check_choice("tools", body.tools, "tool_choice", body.tool_choice, may_call)
    _check_choice("functions", body.functions, "function_call", body.function_call, may_call)
    tools = _read("tools", body.tools, _check_tool)
    functions = _read("functions", body.functions, _check_function)
    if tools and functions:
        raise wrong("functions", "cannot be combined with tools, its newer name: leave it out")
    if functions:
        return _written("functions", [{"type": "function", "function": one} for one in functions])
    return _written("tools", tools)


def refuse_tools(body: ToolFields) -> None:
    """For what has no messages. Raises InvalidRequest naming the field."""
    for name in ("tools", "functions"):
        if not is_off(getattr(body, name), []):
            raise unsupported(name, f"is for chat: leave `{name}` out")
    for name in ("tool_choice", "function_call"):
        if not is_off(getattr(body, name), "none", "auto"):
            raise unsupported(name, 'is for chat: leave it out or send "none"')


def _check_choice(
    name: str, given: msgspec.Raw, choice_name: str, choice: msgspec.Raw, may_call: bool
) -> None:
    """Raises InvalidRequest unless the answer is to have no call of what is given."""
    if is_off(choice, "auto"):
        if may_call and not is_off(given, []):
            raise unsupported(
                name,
                f"asks for a tool call: tool calling is not supported yet: leave `{name}` out, or send"
                f' `{choice_name}: "none"` beside it: the model then sees the tools and answers in text',
            )
    elif not is_off(choice, "none"):
        raise unsupported(
            choice_name,
            f"asks for a tool call: tool calling is not supported yet: leave `{choice_name}` out, or send"
            ' "none": the model then sees the tools and answers in text',
        )


def _read(field: str, raw: msgspec.Raw, check: Callable[[Any, str], None]) -> list[dict[str, Any]]:
    given = bytes(raw)
    if given in (b"", b"null", b"[]"):
        return []
    if len(given) > LONGEST_TOOLS:
        raise wrong(field, f"must not be longer than {LONGEST_TOOLS} bytes as JSON")
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise wrong(field, f"cannot be read: {error}") from None
    if not isinstance(found, list):
        raise _wrong_type(field, "a list")
    for index, tool in enumerate(found):
        check(tool, f"{field}[{index}]")
    return found


def _check_tool(tool: Any, path: str) -> None:
    if not isinstance(tool, dict):
        raise _wrong_type(path, 'an object: {"type": "function", "function": {...}}')
    if tool.get("type") != "function":
        raise wrong(f"{path}.type", 'must be "function": chat templates know no other tools')
    _check_function(tool.get("function"), f"{path}.function")


def _check_function(function: Any, path: str) -> None:
    if not isinstance(function, dict):
        raise _wrong_type(path, "an object with the name of the function")
    name, about, parameters = map(function.get, ("name", "description", "parameters"))
    if not isinstance(name, str) or not name:
        raise _wrong_type(f"{path}.name", "a string of at least one character")
    text(f"{path}.name", name, LONGEST_TOOL_NAME)
    if not isinstance(about, str | None):
        raise _wrong_type(f"{path}.description", "a string")
    if not isinstance(parameters, dict | None):
        raise _wrong_type(f"{path}.parameters", "an object: a JSON schema")


def _written(field: str, tools: list[dict[str, Any]]) -> str:
    if not tools:
        return ""
    try:
        written = json.dumps(tools, ensure_ascii=False, allow_nan=False)
        written.encode()
    except ValueError as error:  # a number beyond all bounds, half of a surrogate pair
        raise wrong(field, f"cannot be shown to the model: {error}") from None
    return written


def _wrong_type(field: str, must: str) -> InvalidRequest:
    return wrong(field, f"must be {must}", "INVALID_TYPE")
