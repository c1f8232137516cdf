"""The tools of a request for a response, and which of them may be called."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway.decoding.bounds import text, wrong, wrong_type
from services.gateway.decoding.list_limits import LONGEST_TOOL_NAME, LONGEST_TOOLS
from services.gateway.model.output_forms import OutputForms
from services.gateway.reading.calls.tools import Tools, offered
from services.gateway.reading.fields.unsupported import unsupported

_FIELDS = frozenset({"type", "name", "description", "parameters", "strict"})
_MODES = ("auto", "none", "required")

Function = Mapping[str, Any]


class ReadTools(NamedTuple):
    """What the model is told of, and what the reply repeats."""

    tools: Tools
    listed: Sequence[Any]
    choice: Any


def read_tools(raw: msgspec.Raw, raw_choice: msgspec.Raw, forms: OutputForms) -> ReadTools:
    """The functions among the tools; the model is not told of others, which a server would have to run. Raises
    InvalidRequest naming the field.
    """
    listed = loaded("tools", raw)
    if not isinstance(listed, list | None):
        raise wrong("tools", "must be a list", "INVALID_TYPE")
    functions = [
        _function(tool, f"tools[{index}]")
        for index, tool in enumerate(listed or ())
        if _is_function(tool, f"tools[{index}]")
    ]
    choice = loaded("tool_choice", raw_choice)
    mode, shown = _read_choice(choice, functions)
    found = [{"type": "function", "function": function} for function in shown]
    return ReadTools(
        offered(found, mode, forms), listed or [], "auto" if choice is None else choice
    )


def _is_function(tool: Any, path: str) -> bool:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise wrong(path, "must be an object with a type", "INVALID_TYPE")
    return bool(tool["type"] == "function")


def _function(tool: Mapping[str, Any], path: str) -> Function:
    name, about, parameters, strict = map(tool.get, ("name", "description", "parameters", "strict"))
    if not isinstance(name, str) or not name:
        raise wrong_type(f"{path}.name", "a string of at least one character")
    text(f"{path}.name", name, LONGEST_TOOL_NAME)
    if not isinstance(about, str | None):
        raise wrong_type(f"{path}.description", "a string")
    if not isinstance(parameters, dict | None):
        raise wrong_type(f"{path}.parameters", "an object: a JSON schema")
    if not isinstance(strict, bool | None):
        raise wrong_type(f"{path}.strict", "true or false")
    for field, value in tool.items():
        if field not in _FIELDS and value not in (None, False):
            raise unsupported(f"{path}.{field[:64]}", "is not a field of a function: leave it out")
    return {
        key: tool[key]
        for key in ("name", "description", "parameters", "strict")
        if tool.get(key) is not None
    }


def _read_choice(choice: Any, functions: Sequence[Function]) -> tuple[str, Sequence[Function]]:
    """How `offered` is told of it, and the functions that the model sees. Raises InvalidRequest."""
    if choice is None:
        return "auto", functions
    if isinstance(choice, str) and choice in _MODES:
        return _mode(choice, functions), functions
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return _named(choice.get("name"), functions, "tool_choice.name"), functions
    if kind == "allowed_tools":
        return _allowed(choice, functions)
    raise wrong(
        "tool_choice",
        'must be "auto", "none", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", ...}',
    )


def _mode(mode: str, functions: Sequence[Function]) -> str:
    if mode == "required" and not functions:
        raise wrong("tool_choice", "asks for a call, and there are no functions: send `tools`")
    return mode


def _named(name: Any, functions: Sequence[Function], field: str) -> str:
    if name not in [function["name"] for function in functions]:
        raise wrong(
            field, f"{str(name)[:64]!r} is not among the functions in tools", "UNKNOWN_TOOL"
        )
    return str(name)


def _allowed(
    choice: Mapping[str, Any], functions: Sequence[Function]
) -> tuple[str, Sequence[Function]]:
    """The model sees those that are allowed, and no others."""
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise wrong("tool_choice.mode", "must be auto or required")
    if not isinstance(allowed, list) or not allowed:
        raise wrong_type("tool_choice.tools", "a list of at least one tool")
    names = set()
    for index, tool in enumerate(allowed):
        field = f"tool_choice.tools[{index}].name"
        name = tool.get("name") if isinstance(tool, dict) else None
        names.add(_named(name, functions, field))
    shown = [function for function in functions if function["name"] in names]
    return _mode(mode, shown), shown


def loaded(field: str, raw: msgspec.Raw) -> Any:
    """JSON that has not been read yet; None where there is none. Raises InvalidRequest."""
    given = bytes(raw)
    if not given:
        return None
    if len(given) > LONGEST_TOOLS:
        raise wrong(field, f"must not be longer than {LONGEST_TOOLS} bytes as JSON")
    try:
        value = json.loads(given)
        json.dumps(value, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise wrong(field, f"cannot be read: {error}") from None
    return value
