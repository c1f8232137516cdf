"""Ollama's request bodies, checked and turned into our own types."""

from dataclasses import replace

from services.gateway.api.ollama.conversation import fill, fill_turns, opened
from services.gateway.api.ollama.options import read_format, read_options
from services.gateway.api.ollama.schema import ChatBody, GenerateBody, GeneratingBody
from services.gateway.decoding.bounds import wrong
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.divided import divided
from services.gateway.reading.calls.tools import ToolFields, Tools, read_tools
from services.gateway.reading.conversation import check_sizes
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.reading.generation import (
    Prompt,
    conversation_prompt,
    read_generation,
    text_prompt,
)
from services.gateway.reading.logprob_fields import chat_logprobs
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_NO_TOOLS = "leave `tools` out"


class OnlyLoads(Exception):
    """A valid request for no tokens: it has the model loaded, which it always is."""


def read_chat(body: ChatBody, model: ServedModel) -> tuple[ValidRequest, GenerationOptions]:
    """POST /api/chat. Raises InvalidRequest naming the field, NotFound, or OnlyLoads."""
    options = read_options(body, model)
    tools = read_tools(ToolFields(tools=body.tools), model.forms, none=_NO_TOOLS)
    if not body.messages:
        raise OnlyLoads
    prepare = opened(body, model)
    prepare.conversation.tools_json = tools.json
    fill_turns(body.messages, prepare.conversation)
    prompt, scores = conversation_prompt(prepare, model), _logprobs(body, model)
    kind = ReplyKind.REPLY_KIND_OLLAMA_CHAT
    request = read_generation(options, prompt, kind, scores, model, read_format(body))
    kind = ReplyKind.REPLY_KIND_OLLAMA_CHAT_MESSAGE
    return _divided(request, body, options, tools, model, kind), options


def read_generate(body: GenerateBody, model: ServedModel) -> tuple[ValidRequest, GenerationOptions]:
    """POST /api/generate. Raises InvalidRequest naming the field, NotFound, or OnlyLoads."""
    options = read_options(body, model)
    _check_generate(body)
    if not body.prompt:
        raise OnlyLoads
    kind, form = ReplyKind.REPLY_KIND_OLLAMA_GENERATE, read_format(body)
    scores = _logprobs(body, model)
    if body.raw:
        prompt = text_prompt(body.prompt)
        request = read_generation(options, prompt, kind, scores, model, form)
        return replace(request, lowers_max_tokens=True), options
    prompt = _templated(body, body.prompt, model)
    request = read_generation(options, prompt, kind, scores, model, form)
    kind = ReplyKind.REPLY_KIND_OLLAMA_GENERATE_MESSAGE
    return _divided(request, body, options, Tools(), model, kind), options


def _check_generate(body: GenerateBody) -> None:
    if body.raw and (body.system or not is_off(body.template, "") or not is_off(body.context, [])):
        raise wrong("raw", "mode does not support template, system, or context")
    if body.raw and body.think:
        raise unsupported(
            "think",
            "cannot be combined with raw: a prompt as it is says itself whether the model thinks",
        )
    if body.raw and body.images:
        raise unsupported(
            "images",
            "cannot be combined with raw: leave raw out, and the model's template places them",
        )
    if not is_off(body.suffix, ""):
        raise unsupported(
            "suffix", "asks for what goes before a text, and answers only go on behind `prompt`"
        )
    if not is_off(body.template, ""):
        raise unsupported(
            "template",
            "is not taken from requests: leave it out, or send a prompt in its form with raw: true",
        )
    if not is_off(body.context, []):
        raise unsupported("context", "is not taken: send the conversation to /api/chat")


def _templated(body: GenerateBody, prompt: str, model: ServedModel) -> Prompt:
    """A conversation of the prompt alone, behind its system message."""
    check_sizes([len(body.images or ()) + 2])
    prepare = opened(body, model)
    if body.system:
        fill(prepare.conversation.messages.add(), "system", body.system)
    fill(prepare.conversation.messages.add(), "user", prompt, body.images or (), "images")
    return conversation_prompt(prepare, model)


def _logprobs(body: GeneratingBody, model: ServedModel) -> int | None:
    return chat_logprobs(body.logprobs, body.top_logprobs, model.max_logprobs)


def _divided(
    request: ValidRequest,
    body: GeneratingBody,
    options: GenerationOptions,
    tools: Tools,
    model: ServedModel,
    kind: "ReplyKind.ValueType",
) -> ValidRequest:
    request = replace(request, lowers_max_tokens=True)
    return divided(
        request,
        options,
        tools,
        model,
        single_call=False,
        hides_reasoning=body.think is False,
        kind=kind,
    )
