"""Chats whose answers are divided into content, reasoning and calls of tools."""

import json
from dataclasses import replace

from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.tools import Tools
from services.gateway.reading.constraint import Constraint
from services.gateway.reading.generation import check_form
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import InvalidRequest
from shared.output_format.grammar import Form, behind_reasoning, calls_form
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.scheduler.v1.queue_pb2 import MessageFormat, ReplyKind


def divided(
    request: ValidRequest,
    options: GenerationOptions,
    tools: Tools,
    model: ServedModel,
    *,
    single_call: bool,
    hides_reasoning: bool,
    kind: "ReplyKind.ValueType" = ReplyKind.REPLY_KIND_CHAT_MESSAGE,
) -> ValidRequest:
    """A chat's request, whose answer is divided where the model writes reasoning, or may write calls; and held to calls
    where one has to be made. `kind`: of a reply that is divided. Raises InvalidRequest naming what cannot be asked for
    beside that.
    """
    calls = model.forms.calls if tools.schemas_json else None
    reasoning, reply = model.forms.reasoning, request.reply
    if reply.prompt_only or (calls is None and reasoning is None):
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
        )
    )
    if not tools.demanded or calls is None:
        return request
    if request.constraint is not None:
        field = request.constraint.field
        raise InvalidRequest(
            "CONFLICTING_CONSTRAINTS",
            f"tool_choice and {field} both constrain the answer: give one",
            field="tool_choice",
        )
    check_form(options, "tool_choice")
    form = calls_form(calls, tools.demanded, single=single_call or tools.one_is_named)
    if reasoning is None:
        return replace(request, constraint=_constraint(form, tools))
    begun = behind_reasoning(form, reasoning, in_reasoning=True)
    within = replace(request, constraint=_constraint(begun, tools), sampling=SamplingParams())
    form = behind_reasoning(form, reasoning, in_reasoning=False)
    return replace(request, constraint=_constraint(form, tools), within_reasoning=within)


def _constraint(form: Form, tools: Tools) -> Constraint:
    written = json.dumps({"format": form}).encode()
    return Constraint("tools", "structural_tag", written, lenient=not tools.strict)
