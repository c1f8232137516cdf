"""OpenAI's request bodies, checked field by field and turned into our own types.

Fields that are unknown to us are ignored, since clients send many; fields that would change the
answer and are not supported are refused, since an answer that silently ignores them is wrong.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from services.gateway.fields import Fields
from services.gateway.logprob_fields import read_logprobs
from services.gateway.media import (
    read_image_bytes,
    read_image_url,
    read_video_bytes,
    read_video_frames,
    read_video_url,
)
from services.gateway.model import ServedModel
from services.gateway.request import ValidRequest
from services.gateway.sampling import read_sampling, scores_prompt_only
from shared.errors import InvalidRequest
from shared.token_log import encode_tokens
from tessera.gateway.v1.chat_pb2 import VideoFrames
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    Media,
    Message,
    Part,
    PrepareRequest,
    Video,
)
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, ReplyKind

# Tokens that a chat template may add for each message, far on the safe side.
_TEMPLATE_TOKENS = 64
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_DETAILS = ("", "auto", "low", "high")
_LONGEST_USER = 512
_LONGEST_FRAME_S = 3600.0
_LAST_PRIORITY = 1000

# Each with the values that mean "off": they are what many clients send anyway.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "web_search_options": (),
}


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body. Raises InvalidRequest."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        detail = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest("INVALID_JSON", f"the body is not valid JSON: {detail}") from None
    if not isinstance(content, dict):
        raise InvalidRequest("INVALID_JSON", "the body must be a JSON object")
    return content


def read_chat(content: Mapping[str, Any], model: ServedModel) -> ValidRequest:
    """POST /v1/chat/completions."""
    fields = Fields(content)
    if fields.raw("echo"):
        raise fields.wrong("echo", "is for completions", "UNSUPPORTED_PARAMETER")
    conversation, bound = read_conversation(fields, model)
    return _request(
        fields, model, ReplyKind.REPLY_KIND_CHAT, PrepareRequest(conversation=conversation), bound
    )


def read_conversation(fields: Fields, model: ServedModel) -> tuple[Conversation, int]:
    """The messages and template settings, with an upper bound of the tokens they make."""
    if not isinstance(fields.raw("messages"), list) or not fields.raw("messages"):
        raise fields.wrong("messages", "must be a list of at least one message")
    messages = [_message(message) for message in fields.objects("messages")]
    conversation = Conversation(
        messages=messages,
        chat_template_kwargs_json=_template_kwargs(fields),
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
    )
    return conversation, conversation_bound(conversation, model)


def conversation_bound(conversation: Conversation, model: ServedModel) -> int:
    """More tokens than a conversation makes: one for each byte of text; a picture may fill the
    model.
    """
    bound = len(conversation.chat_template_kwargs_json) + _TEMPLATE_TOKENS
    for message in conversation.messages:
        bound += _TEMPLATE_TOKENS
        for part in message.content:
            is_text = part.WhichOneof("part") == "text"
            bound += len(part.text.encode()) if is_text else model.max_model_len
    return bound


def read_completions(content: Mapping[str, Any], model: ServedModel) -> list[ValidRequest]:
    """POST /v1/completions: a request for each prompt."""
    prompts = content.get("prompt")
    if not isinstance(prompts, list) or not prompts or not isinstance(prompts[0], (str, list)):
        return [read_completion(content, model)]
    if len(prompts) > model.max_prompts:
        raise Fields(content).wrong(
            "prompt",
            f"must not hold more than {model.max_prompts} prompts, not {len(prompts)}: send several"
            " requests",
        )
    if len(prompts) == 1:
        return [read_completion({**content, "prompt": prompts[0]}, model)]
    names = [f"prompt[{index}]" for index in range(len(prompts))]
    return [
        read_completion({**content, name: prompt}, model, name)
        for name, prompt in zip(names, prompts, strict=True)
    ]


def read_completion(
    content: Mapping[str, Any], model: ServedModel, name: str = "prompt"
) -> ValidRequest:
    """One prompt, in the field called `name`."""
    fields = Fields(content)
    prepare, bound, text = _prompt(fields, name, model)
    echo = fields.boolean("echo", False)
    return _request(
        fields,
        model,
        ReplyKind.REPLY_KIND_COMPLETION,
        prepare,
        bound,
        ReplyFormat(echo=echo, prompt_text=text() if echo else ""),
    )


def _request(
    fields: Fields,
    model: ServedModel,
    kind: "ReplyKind.ValueType",
    prepare: PrepareRequest,
    bound: int,
    reply: ReplyFormat | None = None,
) -> ValidRequest:
    refuse_unsupported(fields)
    if "model" in fields:
        model.check_name(fields.string("model"))
    stream = fields.boolean("stream", False)
    options = fields.mapping("stream_options")
    if "stream_options" in fields and not stream:
        raise fields.wrong("stream_options", "is only allowed when stream is true")
    reply = reply or ReplyFormat()
    reply.kind = kind
    reply.include_usage = options.boolean("include_usage", False)
    reply.continuous_usage = options.boolean("continuous_usage_stats", False)
    reply.return_token_ids = fields.boolean("return_token_ids", False)
    reply.skip_special_tokens = fields.boolean("skip_special_tokens", True)
    reply.tokens_as_ids = fields.boolean("return_tokens_as_token_ids", False)
    reply.prompt_only = scores_prompt_only(fields)
    logprobs = read_logprobs(fields, reply, model.max_logprobs)
    prepare.max_prompt_tokens = model.max_model_len - 1
    return ValidRequest(
        prepare=prepare,
        sampling=read_sampling(fields, model, logprobs),
        reply=reply,
        stream=stream,
        user=fields.string("user", longest=_LONGEST_USER),
        prompt_bound=bound,
        priority=fields.integer("priority", -_LAST_PRIORITY, _LAST_PRIORITY) or 0,
    )


def refuse_unsupported(fields: Fields) -> None:
    """Raises InvalidRequest for a field that asks for something that is not offered yet."""
    for name, off in _UNSUPPORTED.items():
        value = fields.raw(name)
        # `is`-like comparison of types: 1 == True, but "n": true is no number.
        if value is None or any(type(value) is type(o) and value == o for o in off):
            continue
        raise fields.wrong(
            name, "asks for something that this server does not offer", "UNSUPPORTED_PARAMETER"
        )


def _message(fields: Fields) -> Message:
    role = fields.string("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"must be one of {', '.join(_ROLES)}, not {role[:32]!r}")
    if fields.raw("tool_calls"):
        raise fields.wrong("tool_calls", "is not offered", "UNSUPPORTED_PARAMETER")
    content = fields.raw("content")
    if isinstance(content, str):
        parts = [Part(text=fields.string("content"))]
    elif isinstance(content, list) and content:
        parts = [_part(part) for part in fields.objects("content")]
    else:
        raise fields.wrong("content", "must be a string or a list of at least one part")
    return Message(role=_ROLES[role], content=parts, name=fields.string("name", longest=256))


def _part(fields: Fields) -> Part:
    match fields.raw("type"):
        case "text":
            if "text" not in fields:
                raise fields.wrong("text", "is missing")
            return Part(text=fields.string("text"))
        case "image_url":
            return Part(image=_image(fields))
        case "video_url":
            return Part(video=_video(fields))
        case other:
            raise fields.wrong(
                "type", f"must be text, image_url or video_url, not {str(other)[:32]!r}"
            )


def _image(fields: Fields) -> Media:
    path, value = fields.path("image_url"), fields.raw("image_url")
    if isinstance(value, bytes):  # never from JSON: the gRPC door has the file itself
        return read_image_bytes(value, path)
    return read_image_url(_image_url(fields), path)


def _image_url(fields: Fields) -> str:
    if isinstance(fields.raw("image_url"), str):
        return fields.string("image_url")
    image = _object(fields, "image_url")
    if image.string("detail") not in _DETAILS:
        raise image.wrong("detail", "must be auto, low or high")
    return image.string("url")


def _video(fields: Fields) -> Video:
    path, value = fields.path("video_url"), fields.raw("video_url")
    if isinstance(value, bytes):  # from the gRPC door, as above
        return read_video_bytes(value, path)
    if isinstance(value, VideoFrames):
        return read_video_frames(value.frames, path, value.seconds_per_frame)
    if isinstance(value, str):
        return read_video_url(fields.string("video_url"), path)
    video = _object(fields, "video_url")
    pace = video.number("seconds_per_frame", 0.0, 0.0, _LONGEST_FRAME_S)
    return read_video_url(video.string("url"), path, pace)


def _object(fields: Fields, name: str) -> Fields:
    """A media part's own fields, of which `url` must be there."""
    if name not in fields:
        raise fields.wrong(name, "is missing")
    inner = fields.mapping(name)
    if "url" not in inner:
        raise inner.wrong("url", "is missing")
    return inner


def _template_kwargs(fields: Fields) -> str:
    kwargs = fields.mapping("chat_template_kwargs")
    if not kwargs.items():
        return ""
    try:
        return json.dumps(dict(kwargs.items()), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise fields.wrong("chat_template_kwargs", f"cannot be passed on: {error}") from None


def _prompt(
    fields: Fields, name: str, model: ServedModel
) -> tuple[PrepareRequest, int, Callable[[], str]]:
    """What to prepare, an upper bound of its tokens, and how to get its text."""
    if isinstance(fields.raw(name), str):
        text = fields.string(name)
        return (
            PrepareRequest(text=text),
            len(text.encode()) + _TEMPLATE_TOKENS,
            lambda: text,
        )
    if not isinstance(fields.raw(name), list) or not fields.raw(name):
        raise fields.wrong(name, "must be a string, or a list of token ids")
    ids = fields.integers(name, 0, model.vocab_size - 1)
    return (
        PrepareRequest(token_ids=encode_tokens(ids)),
        len(ids),
        lambda: model.table.text(ids, skip_special_tokens=False),
    )
