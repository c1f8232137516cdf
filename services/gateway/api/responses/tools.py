"""The tools of a request for a response, and which of them may be called."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway.decoding.bounds import text, wrong, wrong_type
from services.gateway.decoding.list_limits import LONGEST_TOOL_NAME, LONGEST_TOOLS
from services.gateway.model.output_forms import OutputForms
from services.gateway.reading.calls.custom_tools import CUSTOM, CustomTool
from services.gateway.reading.calls.tools import Tools, offered, told_tools
from services.gateway.reading.fields.unsupported import unsupported

_FIELDS = frozenset({"type", "name", "description", "parameters", "strict"})
_MODES = ("auto", "none", "required")

_KINDS = ("function", CUSTOM)

# In the form of chats.
Tool = Mapping[str, Any]


class ReadTools(NamedTuple):
    """What the model is told of, and what the reply repeats."""

    tools: Tools
    listed: Sequence[Any]
    choice: Any


def read_tools(raw: msgspec.Raw, raw_choice: msgspec.Raw, forms: OutputForms) -> ReadTools:
    """The functions and custom tools; the model is not told of other tools, which a server would have to run. Raises
    InvalidRequest naming the field.
    """
    listed = loaded("tools", raw)
    if not isinstance(listed, list | None):
        raise wrong("tools", "must be a list", "INVALID_TYPE")
    custom: dict[str, CustomTool] = {}
    read = [_read(tool, f"tools[{index}]") for index, tool in enumerate(listed or ())]
    found = told_tools(read, custom, forms, is_nested=False)
    choice = loaded("tool_choice", raw_choice)
    mode, shown = _read_choice(choice, found, custom)
    return ReadTools(
        offered(shown, mode, forms, custom=custom),
        listed or [],
        "auto" if choice is None else choice,
    )


def _read(tool: Any, path: str) -> dict[str, Any]:
    """A function in the form of chats; of other tools what was sent."""
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise wrong(path, "must be an object with a type", "INVALID_TYPE")
    if tool["type"] != "function":
        return tool
    return {"type": "function", "function": _function(tool, path)}


def _function(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
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


def _read_choice(
    choice: Any, tools: Sequence[Tool], custom: Collection[str]
) -> tuple[str, Sequence[Tool]]:
    """How `offered` is told of it, and the tools that the model sees. Raises InvalidRequest."""
    if choice is None:
        return "auto", tools
    if isinstance(choice, str) and choice in _MODES:
        return _mode(choice, tools), tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in _KINDS:
        return _named(choice, tools, custom, "tool_choice.name"), tools
    if kind == "allowed_tools":
        return _allowed(choice, tools, custom)
    raise wrong(
        "tool_choice",
        'must be "auto", "none", "required", {"type": "function", "name": ...}, {"type": "custom", "name": ...} or'
        ' {"type": "allowed_tools", ...}',
    )


def _mode(mode: str, tools: Sequence[Tool]) -> str:
    if mode == "required" and not tools:
        raise wrong("tool_choice", "asks for a call, and there are no functions: send `tools`")
    return mode


def _named(named: Any, tools: Sequence[Tool], custom: Collection[str], field: str) -> str:
    """The name of the tool that is named with its type; without a type it is a function."""
    name, kind = None, "function"
    if isinstance(named, dict):
        name, kind = named.get("name"), named.get("type", kind)
    names = [tool["function"]["name"] for tool in tools]
    if name not in names or kind not in _KINDS or (name in custom) != (kind == CUSTOM):
        what = "custom tools" if kind == CUSTOM else "functions"
        raise wrong(field, f"{str(name)[:64]!r} is not among the {what} in tools", "UNKNOWN_TOOL")
    return str(name)


def _allowed(
    choice: Mapping[str, Any], tools: Sequence[Tool], custom: Collection[str]
) -> tuple[str, Sequence[Tool]]:
    """The model sees those that are allowed, and no others."""
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise wrong("tool_choice.mode", "must be auto or required")
    if not isinstance(allowed, list) or not allowed:
        raise wrong_type("tool_choice.tools", "a list of at least one tool")
    names = {
        _named(tool, tools, custom, f"tool_choice.tools[{index}].name")
        for index, tool in enumerate(allowed)
    }
    shown = [tool for tool in tools if tool["function"]["name"] in names]
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
