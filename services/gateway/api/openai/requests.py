"""OpenAI's request bodies, checked field by field and turned into our own types.

Fields that are unknown to us are ignored, since clients send many; fields that would change the
answer and are not supported are refused, since an answer that silently ignores them is wrong.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from services.gateway.admission.cache_salt import read_cache_salt
from services.gateway.admission.model import ServedModel
from services.gateway.admission.request import ValidRequest
from services.gateway.reading.content_parts import read_part
from services.gateway.reading.fields import Fields
from services.gateway.reading.list_limits import (
    LONGEST_TEMPLATE_KWARGS,
    MOST_MESSAGES,
    MOST_PARTS,
)
from services.gateway.reading.logprob_fields import read_logprobs
from services.gateway.reading.sampling import read_sampling, scores_prompt_only
from services.gateway.reading.unsupported import NO_TOOLS, refuse_unsupported
from shared.queue.token_log import encode_tokens, stride
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    Message,
    Part,
    PrepareRequest,
)
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, ReplyKind

# Tokens that a chat template may add for each message, far on the safe side.
_TEMPLATE_TOKENS = 64
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_LONGEST_USER = 512
_LAST_PRIORITY = 1000
# What huggingface_hub's InferenceClient calls the model where its user named none; older ones: tgi.
_NO_MODEL = frozenset({"dummy", "tgi"})


def read_chat(content: Mapping[str, Any], model: ServedModel) -> ValidRequest:
    """POST /v1/chat/completions."""
    fields = Fields(content)
    if fields.raw("echo"):
        raise fields.wrong("echo", "is for completions", "UNSUPPORTED_PARAMETER")
    conversation, bound = read_conversation(fields, model)
    return _request(
        fields, model, ReplyKind.REPLY_KIND_CHAT, PrepareRequest(conversation=conversation), bound
    )


def check_model(fields: Fields, model: ServedModel) -> None:
    """Raises NotFound for a body that names another model. One that names none means this one."""
    if "model" in fields and fields.string("model") not in _NO_MODEL:
        model.check_name(fields.string("model"))


def read_conversation(fields: Fields, model: ServedModel) -> tuple[Conversation, int]:
    """The messages and template settings, with an upper bound of the tokens they make."""
    if not isinstance(fields.raw("messages"), list) or not fields.raw("messages"):
        raise fields.wrong("messages", "must be a list of at least one message")
    listed = fields.objects("messages", MOST_MESSAGES)
    contents = (message.raw("content") for message in listed)
    if sum(len(parts) for parts in contents if isinstance(parts, list)) > MOST_PARTS:
        raise fields.wrong("messages", f"must not hold more than {MOST_PARTS} parts in all")
    messages = [_message(message) for message in listed]
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
    check_model(fields, model)
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
    sampling = read_sampling(fields, model, logprobs)
    prepare.max_prompt_tokens = model.max_model_len - 1
    keep = read_truncation(fields, model, prepare, sampling.max_tokens)
    if keep and prepare.token_ids:  # nothing has to be tokenized for it
        prepare.token_ids = prepare.token_ids[-stride(None) * keep :]
    else:
        prepare.keep_last_tokens = keep
    return ValidRequest(
        prepare=prepare,
        sampling=sampling,
        reply=reply,
        stream=stream,
        user=fields.string("user", longest=_LONGEST_USER),
        prompt_bound=min(bound, keep or bound),
        priority=fields.integer("priority", -_LAST_PRIORITY, _LAST_PRIORITY) or 0,
        cache_salt=read_cache_salt(fields),
    )


def read_truncation(
    fields: Fields, model: ServedModel, prepare: PrepareRequest, max_tokens: int
) -> int:
    """How many tokens of the prompt's end are kept; 0 is all. -1 means as many as leave room for the
    answer.
    """
    name = "truncate_prompt_tokens"
    wanted = fields.integer(name, -1, model.max_model_len)
    if wanted is None:
        return 0
    if wanted == 0:
        raise fields.wrong(name, "must be -1 or at least 1")
    if fields.raw("echo"):
        raise fields.wrong(name, "cannot be combined with echo, which repeats the whole prompt")
    parts = (part for message in prepare.conversation.messages for part in message.content)
    if any(part.WhichOneof("part") != "text" for part in parts):
        raise fields.wrong(name, "cannot be combined with media: shorten the text instead")
    return wanted if wanted > 0 else max(1, model.max_model_len - max(1, max_tokens))


def _message(fields: Fields) -> Message:
    role = fields.string("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"must be one of {', '.join(_ROLES)}, not {role[:32]!r}")
    if fields.raw("tool_calls"):
        raise fields.wrong("tool_calls", NO_TOOLS.format("tool_calls"), "UNSUPPORTED_PARAMETER")
    content = fields.raw("content")
    if isinstance(content, str):
        parts = [Part(text=fields.string("content"))]
    elif isinstance(content, list) and content:
        parts = [read_part(part) for part in fields.objects("content", MOST_PARTS)]
    else:
        raise fields.wrong("content", "must be a string or a list of at least one part")
    return Message(role=_ROLES[role], content=parts, name=fields.string("name", longest=256))


def _template_kwargs(fields: Fields) -> str:
    kwargs = fields.mapping("chat_template_kwargs")
    if not kwargs.items():
        return ""
    try:
        text = json.dumps(dict(kwargs.items()), allow_nan=False)
    except ValueError as error:
        raise fields.wrong("chat_template_kwargs", f"cannot be passed on: {error}") from None
    if len(text) > LONGEST_TEMPLATE_KWARGS:
        limit = f"must not be longer than {LONGEST_TEMPLATE_KWARGS} bytes as JSON"
        raise fields.wrong("chat_template_kwargs", limit)
    return text


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
