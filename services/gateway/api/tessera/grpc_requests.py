"""The messages of the gRPC API, checked and turned into our own types."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.tessera.grpc_conversation import as_raw, read_conversation
from services.gateway.decoding.bounds import at_most
from services.gateway.decoding.list_limits import MOST_IDS
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.divided import divided
from services.gateway.reading.calls.tools import ToolFields, read_template_fields, read_tools
from services.gateway.reading.generation import (
    Prompt,
    conversation_prompt,
    ids_prompt,
    read_generation,
    text_prompt,
)
from services.gateway.reading.logprob_fields import chat_logprobs, completion_logprobs
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.structured.fields import StructuredOutputs
from services.gateway.reading.valid_request import ValidRequest
from tessera.gateway.v1 import chat_pb2
from tessera.gateway.v1.chat_pb2 import ChatRequest, CompleteRequest
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_NOTHING = msgspec.Raw()


def read_chat(request: ChatRequest, options: GenerationOptions, model: ServedModel) -> ValidRequest:
    """A conversation to answer. Raises InvalidRequest naming the field as REST does, or NotFound."""
    fields = _tools(request)
    tools = read_tools(fields, model.forms)
    conversation = read_conversation(request.messages, request.chat_template_kwargs_json)
    conversation.add_generation_prompt = not request.continue_final_message
    conversation.tools_json = tools.json
    read_template_fields(fields, conversation)
    asked = value_or_none(request.options, "logprobs")
    logprobs = chat_logprobs(asked is not None, asked, model.max_logprobs)
    prompt = conversation_prompt(PrepareRequest(conversation=conversation), model)
    valid = read_generation(options, prompt, ReplyKind.REPLY_KIND_CHAT, logprobs, model)
    return divided(
        valid,
        options,
        tools,
        model,
        single_call=fields.parallel_tool_calls is False,
        hides_reasoning=request.HasField("include_reasoning") and not request.include_reasoning,
    )


def read_complete(
    request: CompleteRequest, options: GenerationOptions, model: ServedModel
) -> ValidRequest:
    """A prompt to continue. Raises InvalidRequest naming the field as REST does, or NotFound."""
    logprobs = completion_logprobs(
        value_or_none(request.options, "logprobs"), None, model.max_logprobs
    )
    prompt = _prompt(request, model)
    return read_generation(options, prompt, ReplyKind.REPLY_KIND_COMPLETION, logprobs, model)


def read_chat_options(request: ChatRequest) -> GenerationOptions:
    """Those of a conversation, which are its own beside those of all requests. Raises InvalidRequest."""
    options = read_options(request.model, request.options)
    if request.HasField("thinking_token_budget"):
        options.thinking_token_budget = request.thinking_token_budget
    options.mm_processor_kwargs = as_raw(request.mm_processor_kwargs_json)
    options.media_io_kwargs = as_raw(request.media_io_kwargs_json)
    return options


def read_options(
    model: str, options: chat_pb2.GenerationOptions, *, echo: bool = False
) -> GenerationOptions:
    """The options under the names of REST; what is not set is None. Raises InvalidRequest for lists
    that are too long.
    """
    return GenerationOptions(
        model=model or None,
        user=options.user or None,
        echo=echo,
        prompt_logprobs=value_or_none(options, "prompt_logprobs"),
        return_token_ids=options.return_token_ids,
        skip_special_tokens=value_or_none(options, "skip_special_tokens"),
        n=value_or_none(options, "n"),
        best_of=value_or_none(options, "best_of"),
        use_beam_search=options.use_beam_search,
        length_penalty=value_or_none(options, "length_penalty"),
        early_stopping="never" if options.early_stopping_never else options.early_stopping,
        max_tokens=value_or_none(options, "max_tokens"),
        min_tokens=value_or_none(options, "min_tokens"),
        ignore_eos=options.ignore_eos,
        stop=_listed("stop", options.stop),
        stop_token_ids=_listed("stop_token_ids", options.stop_token_ids),
        include_stop_str_in_output=options.include_stop_str_in_output,
        truncate_prompt_tokens=value_or_none(options, "truncate_prompt_tokens"),
        max_window_size=value_or_none(options, "max_window_size"),
        seed=value_or_none(options, "seed"),
        temperature=value_or_none(options, "temperature"),
        top_p=value_or_none(options, "top_p"),
        top_k=value_or_none(options, "top_k"),
        min_p=value_or_none(options, "min_p"),
        repetition_penalty=value_or_none(options, "repetition_penalty"),
        presence_penalty=value_or_none(options, "presence_penalty"),
        frequency_penalty=value_or_none(options, "frequency_penalty"),
        logit_bias={str(token): bias for token, bias in options.logit_bias.items()} or None,
        allowed_token_ids=_listed("allowed_token_ids", options.allowed_token_ids),
        bad_token_ids=_listed("bad_token_ids", options.bad_token_ids),
        bad_words=_listed("bad_words", options.bad_words),
        priority=value_or_none(options, "priority"),
        service_tier=options.service_tier or None,
        timeout=value_or_none(options, "timeout"),
        cache_salt=value_or_none(options, "cache_salt"),
        add_special_tokens=value_or_none(options, "add_special_tokens"),
        structured_outputs=_structured_outputs(options),
    )


def _structured_outputs(options: chat_pb2.GenerationOptions) -> StructuredOutputs | None:
    if not options.HasField("structured_outputs"):
        return None
    found = options.structured_outputs
    form = found.WhichOneof("form")
    return StructuredOutputs(
        json=_as_json(found.json) if form == "json" else _NOTHING,
        json_object=found.json_object if form == "json_object" else None,
        regex=found.regex if form == "regex" else None,
        choice=list(found.choice.texts) if form == "choice" else None,
        grammar=found.grammar if form == "grammar" else None,
        structural_tag=_as_json(found.structural_tag) if form == "structural_tag" else _NOTHING,
        whitespace_pattern=found.whitespace_pattern
        if found.HasField("whitespace_pattern")
        else None,
        disable_any_whitespace=found.disable_any_whitespace or None,
        disable_additional_properties=found.disable_additional_properties
        if found.HasField("disable_additional_properties")
        else None,
    )


def _as_json(text: str) -> msgspec.Raw:
    """JSON in a text, as a body of REST may have it too."""
    return msgspec.Raw(msgspec.json.encode(text))


def _tools(request: ChatRequest) -> ToolFields:
    """As they stand in a body of REST."""
    choice = request.tool_choice
    if choice and not choice.startswith("{"):
        choice = json.dumps(choice)
    several = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    return ToolFields(
        tools=as_raw(request.tools_json),
        tool_choice=as_raw(choice),
        parallel_tool_calls=several,
        documents=as_raw(request.documents_json),
        reasoning_effort=request.reasoning_effort or None,
        continue_final_message=request.continue_final_message,
    )


def value_or_none(message: Any, name: str) -> Any:
    """The value of an optional field of a message; None if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def _listed(name: str, values: Sequence[Any]) -> list[Any] | None:
    """A repeated field as a list, its length checked before; None if it is empty."""
    at_most(name, len(values), MOST_IDS)
    return list(values) or None


def _prompt(request: CompleteRequest, model: ServedModel) -> Prompt:
    if request.WhichOneof("prompt") == "text":
        return text_prompt(request.text)
    return ids_prompt(list(request.token_ids.ids), model)
