"""Anthropic's request bodies, checked and turned into our own types."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from services.gateway.api.anthropic.context_management import edit
from services.gateway.api.anthropic.conversation import read_messages
from services.gateway.api.anthropic.refused_fields import refuse_fields
from services.gateway.api.anthropic.schema import (
    CountBody,
    MessagesBody,
    OutputConfig,
    Thinking,
    Tool,
    ToolChoice,
)
from services.gateway.decoding.bounds import INT32_MAX, text, whole, wrong
from services.gateway.decoding.list_limits import LONGEST_TOOL_NAME, LONGEST_TOOLS
from services.gateway.model.output_forms import OutputForms
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.budget import can_bound
from services.gateway.reading.calls.divided import divided
from services.gateway.reading.calls.tools import Tools, offered
from services.gateway.reading.constraint import Constraint
from services.gateway.reading.generation import check_model, conversation_prompt, read_generation
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.structured.spellings import checked
from services.gateway.reading.valid_request import ValidRequest
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING = ("enabled", "adaptive", "disabled")
_DISPLAYS = (None, "summarized", "omitted")
_NO_CALLS = (
    'send `tool_choice: {"type": "none"}`: the model then sees the tools and answers in text'
)
_BUDGET = "thinking.budget_tokens"
_KIND = ReplyKind.REPLY_KIND_ANTHROPIC
# Above the length of any model.


class _Asked(NamedTuple):
    """What both routes read."""

    prepare: PrepareRequest
    tools: Tools


def read_count(body: CountBody, model: ServedModel) -> PrepareRequest:
    """POST /v1/messages/count_tokens. Raises InvalidRequest naming the field, or NotFound."""
    check_model(body.model, model)
    _form(body)
    return _read(body, model, may_call=False).prepare


def read_message(body: MessagesBody, model: ServedModel) -> tuple[ValidRequest, GenerationOptions]:
    """POST /v1/messages. Raises InvalidRequest naming the field, or NotFound."""
    options = GenerationOptions(
        model=body.model,
        user=body.metadata.user_id if body.metadata is not None else None,
        service_tier=body.service_tier,
        stream=body.stream,
        max_tokens=_max_tokens(body.max_tokens, model),
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        thinking_token_budget=_budget(body.thinking, model),
    )
    asked = _read(body, model)
    prompt = conversation_prompt(asked.prepare, model)
    form = _form(body)
    request = read_generation(options, prompt, _KIND, None, model, form)
    request = divided(
        request,
        options,
        asked.tools,
        model,
        single_call=_single(body.tool_choice),
        hides_reasoning=_hides(body.thinking),
        kind=_KIND,
        budget_field=_BUDGET,
    )
    return replace(request, lowers_max_tokens=True), options


def _max_tokens(given: float | None, model: ServedModel) -> int | None:
    """Clients, which have to send it, send thousands where nobody has said how many."""
    count = whole("max_tokens", given, 1, INT32_MAX)
    return None if count is None else min(count, model.max_model_len)


def _read(body: CountBody, model: ServedModel, *, may_call: bool = True) -> _Asked:
    refuse_fields(body)
    tools = _read_tools(body, model.forms, may_call=may_call)
    prepare = PrepareRequest()
    conversation = prepare.conversation
    conversation.tools_json = tools.json
    told = {**_effort(body.output_config), **_thinking(body.thinking, model)}
    conversation.chat_template_kwargs_json = json.dumps(told) if told else ""
    read_messages(body, conversation)
    edit(body.context_management, conversation)
    return _Asked(prepare, tools)


def _read_tools(body: CountBody, forms: OutputForms, *, may_call: bool) -> Tools:
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    if sum(len(json.dumps(tool)) for tool in tools) > LONGEST_TOOLS:
        raise wrong("tools", f"must not be longer than {LONGEST_TOOLS} characters as JSON")
    choice = _choice(body.tool_choice, [tool["function"]["name"] for tool in tools])
    return offered(tools, choice if may_call else "none", forms, _NO_CALLS)


def _tool(tool: Tool, path: str) -> Mapping[str, Any]:
    if tool.type not in (None, "custom"):
        raise wrong(
            f"{path}.type",
            f'must be "custom", not {tool.type[:64]!r}: this server runs no tools, and knows those alone that have an'
            " input_schema",
        )
    if not tool.name:
        raise wrong(f"{path}.name", "is missing")
    function: dict[str, Any] = {"name": text(f"{path}.name", tool.name, LONGEST_TOOL_NAME)}
    if tool.description is not None:
        function["description"] = tool.description
    given = bytes(tool.input_schema)
    if not given.startswith(b"{"):
        raise wrong(f"{path}.input_schema", "must be an object: a JSON schema", "INVALID_TYPE")
    if len(given) > LONGEST_TOOLS:
        raise wrong("tools", f"must not be longer than {LONGEST_TOOLS} characters as JSON")
    function["parameters"] = read_json(given, f"{path}.input_schema")
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def read_json(given: bytes, field: str) -> Any:
    """JSON that has not been read yet. Raises InvalidRequest."""
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise wrong(field, f"cannot be read: {error}") from None


def _choice(choice: ToolChoice | None, names: list[str]) -> str:
    if choice is None:
        return "auto"
    if choice.type == "tool":
        if choice.name not in names:
            name = str(choice.name)[:64]
            raise wrong("tool_choice.name", f"{name!r} is not among tools", "UNKNOWN_TOOL")
        return str(choice.name)
    if choice.type is None or choice.type not in _CHOICES:
        raise wrong("tool_choice.type", "must be auto, any, tool or none")
    if choice.type == "any" and not names:
        raise wrong("tool_choice", "asks for a call, and there are no tools: send `tools`")
    return _CHOICES[choice.type]


def _single(choice: ToolChoice | None) -> bool:
    return choice is not None and choice.disable_parallel_tool_use is True


def _effort(config: OutputConfig | None) -> Mapping[str, Any]:
    if config is None or config.effort is None:
        return {}
    if config.effort not in _EFFORTS:
        raise wrong("output_config.effort", f"must be one of {', '.join(_EFFORTS)}")
    return {"reasoning_effort": config.effort}


def _thinking(thinking: Thinking | None, model: ServedModel) -> Mapping[str, Any]:
    """What chat templates are told."""
    if thinking is None:
        return {}
    if thinking.type not in _THINKING:
        raise wrong("thinking.type", f"must be one of {', '.join(_THINKING)}")
    if thinking.display not in _DISPLAYS:
        raise wrong("thinking.display", "must be summarized or omitted")
    budget = whole(_BUDGET, thinking.budget_tokens, 1, model.max_model_len)
    if (budget is not None) != (thinking.type == "enabled"):
        says = "is missing" if budget is None else 'is for `type: "enabled"` alone: leave it out'
        raise wrong(_BUDGET, says)
    told: dict[str, Any] = {"enable_thinking": thinking.type != "disabled"}
    return told if budget is None else {**told, "thinking_budget": budget}


def _budget(thinking: Thinking | None, model: ServedModel) -> float | None:
    """Of a model whose reasoning cannot be told from its answer, `max_tokens` bounds both together."""
    if thinking is None or thinking.type != "enabled" or not can_bound(model):
        return None
    return thinking.budget_tokens


def _hides(thinking: Thinking | None) -> bool:
    return thinking is not None and (thinking.type == "disabled" or thinking.display == "omitted")


def _form(body: CountBody) -> Constraint | None:
    form = body.output_config.format if body.output_config is not None else None
    path = "output_config.format"
    if form is None:
        form, path = body.output_format, "output_format"
    elif body.output_format is not None:
        raise wrong("output_format", f"is the older name of {path}: send one of them")
    if form is None:
        return None
    if form.type != "json_schema":
        raise wrong(f"{path}.type", 'must be "json_schema"')
    given = bytes(form.schema)
    if not given.startswith(b"{"):
        raise wrong(f"{path}.schema", "must be an object: a JSON schema", "INVALID_TYPE")
    return checked(Constraint(f"{path}.schema", "json", given))
