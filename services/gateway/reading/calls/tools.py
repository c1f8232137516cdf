"""Tools, whether the model may call them, and what else a chat template is told about: documents, how hard to think,
whether the last message is gone on with.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from services.gateway.decoding.about import Refused, about
from services.gateway.decoding.bounds import text, wrong, wrong_type
from services.gateway.decoding.list_limits import (
    LONGEST_DOCUMENTS,
    LONGEST_TOOL_NAME,
    LONGEST_TOOLS,
)
from services.gateway.model.output_forms import OutputForms
from services.gateway.reading.calls.custom_tools import CUSTOM, CustomTool, read_custom_tool
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.reading.media.media_options import MediaFields
from shared.output_format.grammar import has_grammar
from tessera.preprocess.v1.preprocess_pb2 import Conversation

_NONE = msgspec.Raw()
_REQUIRED, _ALLOWED, _FUNCTION = "required", "allowed_tools", "function"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class ToolFields(MediaFields, kw_only=True):
    """The fields; lists as unread JSON, which is empty where a body does not have them."""

    tools: Annotated[
        msgspec.Raw,
        about(
            'tools that the model sees and may call: a list of {"type": "function", "function": {"name", "description",'
            ' "parameters"}}, in chat also {"type": "custom", "custom": {"name", "description", "format"}}',
            "none",
        ),
    ] = _NONE
    tool_choice: Annotated[
        msgspec.Raw,
        about(
            '"auto", "none", "required", {"type": "function", "function": {"name": ...}}, likewise of a custom tool, or'
            ' {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}',
            "auto",
        ),
    ] = _NONE
    parallel_tool_calls: Annotated[
        bool | None, about("false leaves all calls but the first one out", "true")
    ] = None
    functions: Refused = _NONE
    function_call: Refused = _NONE
    documents: Annotated[
        msgspec.Raw,
        about("a list of objects that chat templates know as `documents`; up to 1 MiB", "none"),
    ] = _NONE
    reasoning_effort: Annotated[
        str | None,
        about(
            "how hard to think, for the chat template: none, minimal, low, medium, high or xhigh",
            "the template's",
        ),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        about(
            "true: the prompt ends where the text of the last message does, and the answer goes on with it; not with"
            " `add_generation_prompt: true`",
            "false",
        ),
    ] = None


class Tools(NamedTuple):
    """The tools as a JSON list of {"type": "function", "function": {...}}, as the client wrote them; empty for none."""

    # Custom tools among them as the functions as which the model knows them.
    json: str = ""
    # The schemas of their parameters by name, as a JSON object, where the model may call them; else empty.
    schemas_json: str = ""
    # Of those of which one has to be called: all of them or one, as `tool_choice` says; none where none has to be.
    demanded: Mapping[str, Any] = {}
    one_is_named: bool = False
    # Whether a schema is to be kept to the letter.
    strict: bool = False
    # Those that the model may call whose input is one text, by name; and functions that are to be kept to the letter.
    custom: Mapping[str, CustomTool] = {}
    strict_functions: Collection[str] = ()

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """The grammars of custom tools, by name."""
        return {name: tool.form() for name, tool in self.custom.items() if tool.syntax}


# How a request says that its tools are only to be seen.
_SHOWN_ALONE = 'send `tool_choice: "none"`: the model then sees the tools and answers in text'


def read_tools(
    body: ToolFields,
    forms: OutputForms,
    *,
    may_call: bool = True,
    takes_custom: bool = False,
    none: str = _SHOWN_ALONE,
) -> Tools:
    """The tools of a body. `may_call`: whether what the request gets could be a call; `takes_custom`: whether it may be
    one of a custom tool; `none`: what a request does that wants none, for the error where calls cannot be given.

    Raises InvalidRequest naming the field: for a call that is asked for and cannot be given, and for tools of another
    shape.
    """
    custom: dict[str, CustomTool] = {}
    tools = _read("tools", body.tools, _check_any_tool if takes_custom else _check_tool)
    if takes_custom:
        tools = told_tools(tools, custom, forms, is_nested=True)
    functions = _read("functions", body.functions, _check_function)
    if tools and functions:
        raise wrong("functions", "cannot be combined with tools, its newer name: leave it out")
    _check_functions(body, may_call and bool(functions))
    if functions:
        return Tools(
            _written("functions", [{"type": "function", "function": f} for f in functions])
        )
    given = _given_choice(body.tool_choice)
    if isinstance(given, dict) and given.get("type") == _ALLOWED:
        given, tools = _allowed(given.get(_ALLOWED), tools, custom)
    choice = _read_choice(given, {tool["function"]["name"] for tool in tools}, custom)
    return offered(tools, choice if may_call else "none", forms, none, custom)


def told_tools(
    listed: Sequence[dict[str, Any]],
    custom: dict[str, CustomTool],
    forms: OutputForms,
    *,
    is_nested: bool,
) -> list[dict[str, Any]]:
    """Functions, and custom tools as the functions as which the model knows them; not those of other types. Custom ones
    are put into `custom`; `is_nested`: their fields stand under this name. Raises InvalidRequest naming the field.
    """
    told: list[dict[str, Any]] = []
    names: set[str] = set()
    for index, tool in enumerate(listed):
        one = None
        if tool["type"] == CUSTOM:
            path = f"tools[{index}]"
            given, path = (tool.get(CUSTOM), f"{path}.{CUSTOM}") if is_nested else (tool, path)
            one = read_custom_tool(given, path, is_nested=is_nested)
        elif tool["type"] != _FUNCTION:
            continue
        told.append(tool if one is None else one.told(forms.calls))
        name = told[-1]["function"]["name"]
        if name in names and (one is not None or name in custom):
            raise wrong(f"tools[{index}]", f"has the name of another tool, {name[:64]!r}")
        names.add(name)
        if one is not None:
            custom[name] = one
    return told


def offered(
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    forms: OutputForms,
    none: str = _SHOWN_ALONE,
    custom: Mapping[str, CustomTool] | None = None,
) -> Tools:
    """Tools that have been checked, in OpenAI's form. `choice`: "auto", "none", "required", or the one that has to be
    called; `none`: what a request does that wants none; `custom`: which of them are no functions. Raises InvalidRequest
    for calls that cannot be given.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if not tools or choice == "none":
        return Tools(_written("tools", tools))
    if forms.calls is None:
        raise wrong(
            "tools",
            "asks for calls, and how this model writes calls is not known: start the server with --tool-call-parser, or"
            f" {none}",
            "NO_TOOL_FORMAT",
        )
    if choice != "auto" and not has_grammar(forms.calls):
        raise unsupported(
            "tool_choice",
            f"asks for a call that has to be made, which is not offered for calls as {forms.calls.name}: leave it out",
        )
    custom = {name: tool for name, tool in (custom or {}).items() if name in schemas}
    for tool in custom.values():
        if tool.syntax and not has_grammar(forms.calls):
            raise unsupported(
                tool.field,
                f"is a grammar, which is not offered for calls as {forms.calls.name}: leave `format` out",
            )
    named = {choice: schemas[choice]} if choice in schemas else {}
    strict = [tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True]
    return Tools(
        _written("tools", tools),
        json.dumps(schemas, ensure_ascii=False),
        named or (schemas if choice == _REQUIRED else {}),
        bool(named),
        bool(strict),
        custom,
        strict,
    )


def read_template_fields(body: ToolFields, conversation: Conversation) -> None:
    """Documents, how hard to think, whether the last message is gone on with. Raises InvalidRequest."""
    documents = _read("documents", body.documents, _check_document, LONGEST_DOCUMENTS)
    conversation.documents_json = _written("documents", documents)
    effort = body.reasoning_effort
    if effort is not None:
        if effort not in EFFORTS:
            raise wrong("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
        told: dict[str, Any] = {"reasoning_effort": effort}
        if effort == "none":
            told["enable_thinking"] = False
        given = json.loads(conversation.chat_template_kwargs_json or "{}")
        conversation.chat_template_kwargs_json = json.dumps({**told, **given})
    if body.continue_final_message:
        conversation.continue_final_message = True


def refuse_tools(body: ToolFields) -> None:
    """For what has no messages. Raises InvalidRequest naming the field."""
    for name in ("tools", "functions", "documents"):
        if not is_off(getattr(body, name), []):
            raise unsupported(name, f"is for chat: leave `{name}` out")
    for name in ("tool_choice", "function_call"):
        if not is_off(getattr(body, name), "none", "auto"):
            raise unsupported(name, 'is for chat: leave it out or send "none"')
    if body.continue_final_message:
        raise unsupported("continue_final_message", "is for chat: completions go on with `prompt`")


def _given_choice(choice: msgspec.Raw) -> Any:
    """`tool_choice` as it was sent; "auto" where it was not."""
    if is_off(choice, "auto"):
        return "auto"
    try:
        return json.loads(bytes(choice))
    except (ValueError, RecursionError) as error:
        raise wrong("tool_choice", f"cannot be read: {error}") from None


def _allowed(
    given: Any, tools: Sequence[dict[str, Any]], custom: Collection[str]
) -> tuple[Any, list[dict[str, Any]]]:
    """The mode among those tools alone that may be called, and these: the model is told of no others. Raises
    InvalidRequest."""
    path = f"tool_choice.{_ALLOWED}"
    mode, listed = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (0, 0)
    if mode not in ("auto", _REQUIRED):
        raise wrong(f"{path}.mode", 'must be "auto" or "required"')
    if not isinstance(listed, list) or not listed:
        raise wrong(f"{path}.tools", "must be a list of at least one tool")
    names = []
    known = {tool["function"]["name"] for tool in tools}
    for index, tool in enumerate(listed):
        kind, name = _called_name(tool)
        if name not in known or (name in custom) != (kind == CUSTOM):
            field = f"{path}.tools[{index}].{kind}.name"
            raise wrong(field, f"{str(name)[:64]!r} is not among tools", "UNKNOWN_TOOL")
        names.append(name)
    return mode, [tool for tool in tools if tool["function"]["name"] in names]


def _called_name(tool: Any) -> tuple[str, str | None]:
    """Of a tool that is named: its kind, and its name."""
    asked = tool if isinstance(tool, dict) else {}
    kind = CUSTOM if asked.get("type") == CUSTOM else "function"
    named = asked.get(kind)
    name = named.get("name") if isinstance(named, dict) else None
    return kind, name if isinstance(name, str) else None


def _read_choice(asked: Any, names: Collection[str], custom: Collection[str]) -> str:
    """ "auto", "none", "required", or the tool that has to be called. Raises InvalidRequest."""
    if asked in ("auto", "none"):
        return str(asked)
    if asked == _REQUIRED:
        if not names:
            raise wrong("tool_choice", "asks for a call, and there are no tools: send `tools`")
        return _REQUIRED
    kind, name = _called_name(asked)
    if not isinstance(asked, dict) or not isinstance(asked.get(kind), dict):
        raise wrong(
            "tool_choice",
            'must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or {"type":'
            ' "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        )
    if name is None or name not in names or (name in custom) != (kind == CUSTOM):
        field = f"tool_choice.{kind}.name"
        raise wrong(field, f"{str(name)[:64]!r} is not among tools", "UNKNOWN_TOOL")
    return name


def _check_functions(body: ToolFields, may_call: bool) -> None:
    """Raises InvalidRequest for what the older names ask for."""
    if not is_off(body.function_call, "none", "auto") or (
        may_call and is_off(body.function_call, "auto")
    ):
        raise unsupported(
            "functions" if is_off(body.function_call, "auto") else "function_call",
            "asks for a call in the form of an older API: send `tools` and `tool_choice`, its newer names",
        )


def _read(
    field: str, raw: msgspec.Raw, check: Callable[[Any, str], None], longest: int = LONGEST_TOOLS
) -> list[dict[str, Any]]:
    given = bytes(raw)
    if given in (b"", b"null", b"[]"):
        return []
    if len(given) > longest:
        raise wrong(field, f"must not be longer than {longest} bytes as JSON")
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise wrong(field, f"cannot be read: {error}") from None
    if not isinstance(found, list):
        raise wrong_type(field, "a list")
    for index, tool in enumerate(found):
        check(tool, f"{field}[{index}]")
    return found


def _check_document(document: Any, path: str) -> None:
    if not isinstance(document, dict):
        raise wrong_type(path, 'an object, such as {"title": ..., "text": ...}')


def _check_any_tool(tool: Any, path: str) -> None:
    """Custom tools are read later (`told_tools`)."""
    if not isinstance(tool, dict) or tool.get("type") != CUSTOM:
        _check_tool(tool, path, '"function" or "custom"')


def _check_tool(tool: Any, path: str, types: str = '"function"') -> None:
    if not isinstance(tool, dict):
        raise wrong_type(path, 'an object: {"type": "function", "function": {...}}')
    if tool.get("type") != "function":
        raise wrong(f"{path}.type", f"must be {types}: chat templates know no other tools")
    _check_function(tool.get("function"), f"{path}.function")


def _check_function(function: Any, path: str) -> None:
    if not isinstance(function, dict):
        raise wrong_type(path, "an object with the name of the function")
    name, about, parameters = map(function.get, ("name", "description", "parameters"))
    if not isinstance(name, str) or not name:
        raise wrong_type(f"{path}.name", "a string of at least one character")
    text(f"{path}.name", name, LONGEST_TOOL_NAME)
    if not isinstance(about, str | None):
        raise wrong_type(f"{path}.description", "a string")
    if not isinstance(parameters, dict | None):
        raise wrong_type(f"{path}.parameters", "an object: a JSON schema")


def _written(field: str, tools: Sequence[Mapping[str, Any]]) -> str:
    if not tools:
        return ""
    try:
        written = json.dumps(tools, ensure_ascii=False, allow_nan=False)
        written.encode()
    except ValueError as error:  # a number beyond all bounds, half of a surrogate pair
        raise wrong(field, f"cannot be shown to the model: {error}") from None
    return written
