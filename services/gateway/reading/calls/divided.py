"""Chats whose answers are divided into content, reasoning and calls of tools."""

import json
from dataclasses import replace

from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.budget import read_budget
from services.gateway.reading.calls.tools import Tools
from services.gateway.reading.constraint import Constraint
from services.gateway.reading.generation import check_form
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import InvalidRequest
from shared.output_format.grammar import (
    ANY_ARGUMENTS,
    Form,
    behind_reasoning,
    bounded_reasoning,
    calls_form,
    has_grammar,
    text_or_calls_form,
)
from shared.output_format.table import OutputFormat, ReasoningFormat
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.scheduler.v1.queue_pb2 import CustomTool, MessageFormat, ReplyKind

# The form of an answer's text, as APIs with tools mean it: clients send it beside calls that have to be made, and such
# an answer has no text.
_OF_TEXT = ("response_format", "text.format", "output_config.format", "format")


def divided(
    request: ValidRequest,
    options: GenerationOptions,
    tools: Tools,
    model: ServedModel,
    *,
    single_call: bool,
    hides_reasoning: bool,
    kind: "ReplyKind.ValueType" = ReplyKind.REPLY_KIND_CHAT_MESSAGE,
    budget_field: str = "thinking_token_budget",
) -> ValidRequest:
    """A chat's request, whose answer is divided where the model writes reasoning, or may write calls; and held to calls
    where one has to be made. `kind`: of a reply that is divided; `budget_field`: what the client calls a bound of
    reasoning. Raises InvalidRequest naming what cannot be asked for beside that.
    """
    calls = model.forms.calls if tools.schemas_json else None
    reasoning, reply = model.forms.reasoning, request.reply
    if reply.prompt_only or (calls is None and reasoning is None):
        read_budget(request, options, reasoning, model, budget_field)
        return request
    reply.kind = kind
    del reply.clean_up[:]
    reply.message.CopyFrom(
        MessageFormat(
            calls=calls.name if calls is not None else "",
            reasoning=reasoning.name if reasoning is not None else "",
            hides_reasoning=hides_reasoning,
            single_call=single_call,
            schemas_json=tools.schemas_json,
            custom_tools=[
                CustomTool(name=tool.name, is_quoted=tool.is_quoted(calls))
                for tool in tools.custom.values()
            ],
        )
    )
    most = read_budget(request, options, reasoning, model, budget_field)
    if not tools.demanded or calls is None:
        if calls is not None and tools.inputs and request.constraint is None:
            return _with_inputs(request, options, calls, tools, reasoning, most)
        if most is not None and reasoning is not None:
            return _bounded(request, reasoning, most, budget_field)
        if calls is not None and has_grammar(calls):
            return _or_calls(request, calls, tools, single=single_call)
        return request
    if request.constraint is not None and not request.constraint.field.startswith(_OF_TEXT):
        raise _conflict("tool_choice", request.constraint)
    check_form(options, "tool_choice")
    single = single_call or tools.one_is_named
    form = calls_form(calls, tools.demanded, single=single, inputs=tools.inputs)
    if reasoning is None:
        return replace(request, constraint=_constraint(form, tools))
    return _either(
        request,
        _constraint(behind_reasoning(form, reasoning, in_reasoning=False, most=most), tools),
        _constraint(behind_reasoning(form, reasoning, in_reasoning=True, most=most), tools),
    )


def _or_calls(
    request: ValidRequest, calls: OutputFormat, tools: Tools, *, single: bool
) -> ValidRequest:
    """The same; where its text is held to JSON the answer may be calls instead."""
    of_text = request.constraint
    if of_text is None:
        return request
    if of_text.kind != "json" or not of_text.field.startswith(_OF_TEXT):
        if tools.inputs:
            raise _conflict("tools", of_text)
        return request
    schemas = json.loads(tools.schemas_json)
    form = calls_form(calls, schemas, single=single, inputs=tools.inputs)
    return replace(request, constraint=replace(of_text, calls=_constraint(form, tools)))


def _with_inputs(
    request: ValidRequest,
    options: GenerationOptions,
    calls: OutputFormat,
    tools: Tools,
    reasoning: ReasoningFormat | None,
    most: int | None,
) -> ValidRequest:
    """The same, whose calls, if it makes some, are well-formed: a custom tool is given what its grammar has."""
    check_form(options, "tools")
    schemas = {
        name: schema if name in tools.custom or name in tools.strict_functions else ANY_ARGUMENTS
        for name, schema in json.loads(tools.schemas_json).items()
    }
    form = text_or_calls_form(calls, schemas, inputs=tools.inputs)
    if reasoning is None:
        return replace(request, constraint=_constraint(form, tools))
    outside, within = (
        behind_reasoning(form, reasoning, in_reasoning=opened, most=most, gap="")
        for opened in (False, True)
    )
    return _either(request, _constraint(outside, tools), _constraint(within, tools))


def _conflict(field: str, constraint: Constraint) -> InvalidRequest:
    return InvalidRequest(
        "CONFLICTING_CONSTRAINTS",
        f"{field} and {constraint.field} both constrain the answer: give one",
        field=field,
    )


def _bounded(
    request: ValidRequest, reasoning: ReasoningFormat, most: int, field: str
) -> ValidRequest:
    """The same, whose reasoning has at most so many tokens, as `field` asks."""
    forms = (bounded_reasoning(reasoning, most, in_reasoning=opened) for opened in (False, True))
    outside, within = (
        Constraint(field, "structural_tag", json.dumps({"format": form}).encode()) for form in forms
    )
    return _either(request, outside, within)


def _either(request: ValidRequest, outside: Constraint, within: Constraint) -> ValidRequest:
    """The same, held to a form that depends on whether the prompt ends within reasoning."""
    begun = replace(request, constraint=within, sampling=SamplingParams())
    return replace(request, constraint=outside, within_reasoning=begun)


def _constraint(form: Form, tools: Tools) -> Constraint:
    written = json.dumps({"format": form}).encode()
    return Constraint("tools", "structural_tag", written, lenient=not tools.strict)
