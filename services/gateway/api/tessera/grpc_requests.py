"""The messages of the gRPC API, checked and turned into our own types."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.decoding.bounds import at_most, wrong
from services.gateway.decoding.list_limits import MOST_FRAMES, MOST_IDS
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.divided import divided
from services.gateway.reading.calls.earlier import Called, read_call_id, read_calls
from services.gateway.reading.calls.tools import ToolFields, read_template_fields, read_tools
from services.gateway.reading.conversation import check_sizes, read_role
from services.gateway.reading.generation import (
    Prompt,
    conversation_prompt,
    ids_prompt,
    read_generation,
    text_prompt,
)
from services.gateway.reading.logprob_fields import chat_logprobs, completion_logprobs
from services.gateway.reading.media import (
    read_image_bytes,
    read_image_url,
    read_video_bytes,
    read_video_frames,
    read_video_url,
)
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.structured.fields import StructuredOutputs
from services.gateway.reading.valid_request import ValidRequest
from tessera.gateway.v1 import chat_pb2
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, CompleteRequest, ContentPart
from tessera.preprocess.v1.preprocess_pb2 import Conversation, Message, Part, PrepareRequest, Video
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_NOTHING = msgspec.Raw()


def read_chat(request: ChatRequest, options: GenerationOptions, model: ServedModel) -> ValidRequest:
    """A conversation to answer. Raises InvalidRequest naming the field as REST does, or NotFound."""
    check_sizes([len(message.content) for message in request.messages])
    messages = [_message(m, f"messages[{i}]") for i, m in enumerate(request.messages)]
    fields = _tools(request)
    tools = read_tools(fields, model.forms)
    conversation = Conversation(
        messages=messages,
        add_generation_prompt=not request.continue_final_message,
        tools_json=tools.json,
    )
    read_template_fields(fields, conversation)
    asked = _given(request.options, "logprobs")
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
    logprobs = completion_logprobs(_given(request.options, "logprobs"), None, model.max_logprobs)
    prompt = _prompt(request, model)
    return read_generation(options, prompt, ReplyKind.REPLY_KIND_COMPLETION, logprobs, model)


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
        prompt_logprobs=_given(options, "prompt_logprobs"),
        return_token_ids=options.return_token_ids,
        skip_special_tokens=_given(options, "skip_special_tokens"),
        n=_given(options, "n"),
        best_of=_given(options, "best_of"),
        use_beam_search=options.use_beam_search,
        length_penalty=_given(options, "length_penalty"),
        early_stopping="never" if options.early_stopping_never else options.early_stopping,
        max_tokens=_given(options, "max_tokens"),
        min_tokens=_given(options, "min_tokens"),
        ignore_eos=options.ignore_eos,
        stop=_listed("stop", options.stop),
        stop_token_ids=_listed("stop_token_ids", options.stop_token_ids),
        include_stop_str_in_output=options.include_stop_str_in_output,
        truncate_prompt_tokens=_given(options, "truncate_prompt_tokens"),
        max_window_size=_given(options, "max_window_size"),
        seed=_given(options, "seed"),
        temperature=_given(options, "temperature"),
        top_p=_given(options, "top_p"),
        top_k=_given(options, "top_k"),
        min_p=_given(options, "min_p"),
        repetition_penalty=_given(options, "repetition_penalty"),
        presence_penalty=_given(options, "presence_penalty"),
        frequency_penalty=_given(options, "frequency_penalty"),
        logit_bias={str(token): bias for token, bias in options.logit_bias.items()} or None,
        allowed_token_ids=_listed("allowed_token_ids", options.allowed_token_ids),
        bad_token_ids=_listed("bad_token_ids", options.bad_token_ids),
        bad_words=_listed("bad_words", options.bad_words),
        priority=_given(options, "priority"),
        service_tier=options.service_tier or None,
        timeout=_given(options, "timeout"),
        cache_salt=_given(options, "cache_salt"),
        add_special_tokens=_given(options, "add_special_tokens"),
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
        tools=msgspec.Raw(request.tools_json.encode()),
        tool_choice=msgspec.Raw(choice.encode()),
        parallel_tool_calls=several,
        documents=msgspec.Raw(request.documents_json.encode()),
        reasoning_effort=request.reasoning_effort or None,
        continue_final_message=request.continue_final_message,
    )


def _given(options: chat_pb2.GenerationOptions, name: str) -> Any:
    """The value of an optional field; None if it is not set."""
    return getattr(options, name) if options.HasField(name) else None  # type: ignore[arg-type]


def _listed(name: str, values: Sequence[Any]) -> list[Any] | None:
    """A repeated field as a list, its length checked before; None if it is empty."""
    at_most(name, len(values), MOST_IDS)
    return list(values) or None


def _prompt(request: CompleteRequest, model: ServedModel) -> Prompt:
    if request.WhichOneof("prompt") == "text":
        return text_prompt(request.text)
    return ids_prompt(list(request.token_ids.ids), model)


def _message(message: ChatMessage, path: str) -> Message:
    role = read_role(message.role, path)
    found = (Called(call.id, call.name, call.arguments) for call in message.tool_calls)
    calls = read_calls(found, f"{path}.tool_calls")
    if not message.content and not calls:
        raise wrong(f"{path}.content", "must be a string or a list of at least one part")
    parts = [_part(part, f"{path}.content[{i}]") for i, part in enumerate(message.content)]
    alone = len(parts) == 1 and parts[0].WhichOneof("part") == "text"
    return Message(
        role=role,
        content=parts,
        is_string=alone or not parts,  # there is no other way to say so
        tool_calls_json=calls,
        tool_call_id=read_call_id(message.tool_call_id, f"{path}.tool_call_id"),
        reasoning=message.reasoning,
    )


def _part(part: ContentPart, path: str) -> Part:
    match part.WhichOneof("part"):
        case "text":
            return Part(text=part.text)
        case "image":
            return Part(media=read_image_bytes(part.image, f"{path}.image_url"))
        case "image_url":
            return Part(media=read_image_url(part.image_url, f"{path}.image_url"))
        case None:
            raise wrong(
                f"{path}.type",
                "is missing: a part must hold text, image, image_url, video, video_url or video_frames",
            )
        case _:
            return Part(video=_video(part, f"{path}.video_url"))


def _video(part: ContentPart, path: str) -> Video:
    match part.WhichOneof("part"):
        case "video":
            return read_video_bytes(part.video, path)
        case "video_url":
            return read_video_url(part.video_url, path)
        case _:
            found = part.video_frames
            if len(found.frames) > MOST_FRAMES:
                raise wrong(path, f"must not hold more than {MOST_FRAMES} frames")
            return read_video_frames(found.frames, path, found.seconds_per_frame)
