"""Requests for responses, checked and turned into our own types."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.api.compact_json import compact
from services.gateway.api.responses.compaction_items import TYPE as COMPACTION
from services.gateway.api.responses.conversation import join_user_turns, read_items
from services.gateway.api.responses.schema import CompactBody, Item, ResponseBody, TextConfig
from services.gateway.api.responses.tools import ReadTools, loaded, read_tools
from services.gateway.decoding.bounds import at_most, text, whole, wrong
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.divided import divided
from services.gateway.reading.calls.tools import EFFORTS
from services.gateway.reading.constraint import Constraint
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.reading.generation import conversation_prompt, read_generation
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.structured.spellings import any_object, checked
from services.gateway.reading.valid_request import ValidRequest
from tessera.preprocess.v1.preprocess_pb2 import Conversation, PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_MOST_METADATA = 16
_LONGEST_KEY = 64
_LONGEST_VALUE = 512
_LONGEST_NAME = 512
_SUMMARIES = ("auto", "concise", "detailed")
_VERBOSITIES = ("low", "medium", "high")
# What else a response may say that is in ours anyway, or of tools that none has.
_INCLUDED = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_LOGPROBS = "message.output_text.logprobs"
_TRUNCATIONS = ("auto", "disabled")
# What is said of fields that ask for what is not offered.
_REFUSED: Mapping[str, str] = {
    "conversation": "names one, and this server keeps responses alone: send `previous_response_id`",
    "prompt": "names a template, and this server keeps none: send `instructions` and `input`",
    "context_management": 'asks for a summary: leave it out; `truncation: "auto"` leaves out the oldest turns',
    "moderation": "is not offered: leave it out",
}
_KIND = ReplyKind.REPLY_KIND_RESPONSE


def read_response(
    body: ResponseBody, model: ServedModel, earlier: Sequence[Item] = (), ask: str = ""
) -> tuple[ValidRequest, GenerationOptions]:
    """POST /v1/responses. `earlier`: the items of the conversation before; `ask`: what the user says last. Raises
    InvalidRequest naming the field, or NotFound.
    """
    _check(body)
    options = _options(body, model)
    asked = read_tools(body.tools, body.tool_choice, model.forms)
    prepare = PrepareRequest()
    _converse(body, earlier, ask, prepare.conversation)
    prepare.conversation.tools_json = asked.tools.json
    prompt = conversation_prompt(prepare, model)
    request = read_generation(
        options, prompt, _KIND, _logprobs(body, model), model, _form(body.text)
    )
    request.reply.endpoint_json = _repeated(body, asked)
    request = divided(
        request,
        options,
        asked.tools,
        model,
        single_call=body.parallel_tool_calls is False,
        hides_reasoning=False,
        kind=_KIND,
    )
    return request, options


def media_urls(body: ResponseBody | CompactBody) -> Iterator[str]:
    """The URLs that media are read from."""
    for item in body.input if isinstance(body.input, list) else ():
        for parts in (item.content, item.output):
            for part in parts if isinstance(parts, list) else ():
                for url in (part.image_url, part.file_data, part.file_url):
                    if url is not None:
                        yield url


def _check(body: ResponseBody) -> None:
    for name, message in _REFUSED.items():
        if not is_off(getattr(body, name), []):
            raise unsupported(name, message)
    for name in body.include or ():
        if name not in (*_INCLUDED, _LOGPROBS):
            raise unsupported(
                "include", f"asks for {name[:64]!r}, which is not offered: leave it out"
            )
    if body.truncation not in (None, *_TRUNCATIONS):
        raise wrong("truncation", f"must be one of {', '.join(_TRUNCATIONS)}")
    metadata = body.metadata or {}
    at_most("metadata", len(metadata), _MOST_METADATA)
    for name, value in metadata.items():
        text("metadata", name, _LONGEST_KEY)
        text(f"metadata.{name}", value, _LONGEST_VALUE)
    for field in ("safety_identifier", "prompt_cache_key", "prompt_cache_retention"):
        text(field, getattr(body, field), _LONGEST_NAME)
    whole("max_tool_calls", body.max_tool_calls, 1, 1 << 31)
    if body.background and body.store is False:
        raise wrong("store", "cannot be false beside background: the response is asked for later")


def _logprobs(body: ResponseBody, model: ServedModel) -> int | None:
    """How many of the likeliest tokens are shown beside each; None is no log-probability at all."""
    count = whole("top_logprobs", body.top_logprobs, 0, model.max_logprobs) or 0
    return count if count or _LOGPROBS in (body.include or ()) else None


def _options(body: ResponseBody, model: ServedModel) -> GenerationOptions:
    most = whole("max_output_tokens", body.max_output_tokens, 1, model.max_model_len)
    window = model.max_model_len + 1 - (most or 1) if body.truncation == "auto" else None
    return GenerationOptions(
        max_window_size=window,
        model=body.model,
        user=body.user,
        service_tier=body.service_tier,
        stream=body.stream,
        max_tokens=most,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=body.stop,
        thinking_token_budget=body.thinking_token_budget,
        mm_processor_kwargs=body.mm_processor_kwargs,
        media_io_kwargs=body.media_io_kwargs,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        priority=body.priority,
        timeout=body.timeout,
        cache_salt=body.cache_salt,
    )


def _converse(body: ResponseBody, earlier: Sequence[Item], ask: str, into: Conversation) -> None:
    told = {**_effort(body), **_verbosity(body.text)}
    into.chat_template_kwargs_json = json.dumps(told) if told else ""
    into.add_generation_prompt = True
    if body.instructions:
        into.messages.add(role="system", is_string=True).content.add(text=body.instructions)
    read_items(earlier, "previous_response_id", into)
    if isinstance(body.input, str):
        into.messages.add(role="user", is_string=True).content.add(text=body.input)
    else:
        read_items(body.input or (), "input", into)
    if not into.messages:
        raise wrong("input", "must be a text, or a list of at least one item")
    if ask:
        into.messages.add(role="user", is_string=True).content.add(text=ask)
    given = body.input if isinstance(body.input, list) else ()
    if ask or any(item.type == COMPACTION for item in (*earlier, *given)):
        join_user_turns(into)


def _effort(body: ResponseBody) -> Mapping[str, Any]:
    reasoning = body.reasoning
    if reasoning is None:
        return {}
    if reasoning.summary is not None and reasoning.summary not in _SUMMARIES:
        raise wrong("reasoning.summary", f"must be one of {', '.join(_SUMMARIES)}")
    if reasoning.effort is None:
        return {}
    if reasoning.effort not in EFFORTS:
        raise wrong("reasoning.effort", f"must be one of {', '.join(EFFORTS)}")
    told: dict[str, Any] = {"reasoning_effort": reasoning.effort}
    return {**told, "enable_thinking": False} if reasoning.effort == "none" else told


def _verbosity(config: TextConfig | None) -> Mapping[str, Any]:
    if config is None or config.verbosity is None:
        return {}
    if config.verbosity not in _VERBOSITIES:
        raise wrong("text.verbosity", f"must be one of {', '.join(_VERBOSITIES)}")
    return {"verbosity": config.verbosity}


def _form(config: TextConfig | None) -> Constraint | None:
    form = config.format if config is not None else None
    path = "text.format"
    match form and (form.type or ""):
        case None | "text":
            return None
        case "json_object":
            return any_object(path)
        case "json_schema":
            assert form is not None
            given = bytes(form.schema)
            if not given.startswith(b"{"):
                raise wrong(f"{path}.schema", "must be an object: a JSON schema", "INVALID_TYPE")
            loose = form.strict is False
            return checked(
                Constraint(f"{path}.schema", "json", given, closed=not loose, lenient=loose)
            )
        case _:
            raise wrong(f"{path}.type", "must be one of text, json_object, json_schema")


def _repeated(body: ResponseBody, asked: ReadTools) -> str:
    """What the reply says of its request."""
    form: dict[str, Any] = {"type": "text"}
    text_config, reasoning = body.text or TextConfig(), body.reasoning
    if (given := text_config.format) is not None:
        form = {"type": given.type}
        for name in ("name", "description", "strict"):
            if (value := getattr(given, name)) is not None:
                form[name] = value
        if given.type == "json_schema":
            form["schema"] = loaded("text.format.schema", given.schema)
    content = {
        "background": body.background is True,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "store": body.store is not False,
        "text": {
            "format": form,
            **({"verbosity": text_config.verbosity} if text_config.verbosity else {}),
        },
        "tool_choice": asked.choice,
        "tools": asked.listed,
        "top_logprobs": int(body.top_logprobs or 0),
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    return compact(content)
