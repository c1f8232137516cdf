"""OpenAI's request bodies, checked and turned into our own types."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from services.gateway.api.openai.content_parts import read_part
from services.gateway.api.openai.schema import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    MediaUrl,
    TokenizeRequest,
    ToolCall,
)
from services.gateway.decoding.bounds import text, wrong
from services.gateway.decoding.list_limits import LONGEST_TEMPLATE_KWARGS
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.custom_tools import as_arguments
from services.gateway.reading.calls.divided import divided
from services.gateway.reading.calls.earlier import Called, read_call_id, read_calls
from services.gateway.reading.calls.tools import (
    Tools,
    read_template_fields,
    read_tools,
    refuse_tools,
)
from services.gateway.reading.conversation import check_sizes, read_role
from services.gateway.reading.copied_lists import check_copies, check_form_copies
from services.gateway.reading.fields.json_field import object_text
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.reading.generation import (
    Prompt,
    conversation_prompt,
    ids_prompt,
    mindie_prompt,
    read_generation,
    text_prompt,
)
from services.gateway.reading.logprob_fields import chat_logprobs, completion_logprobs
from services.gateway.reading.prompt_parts import marked_prompt
from services.gateway.reading.valid_request import ValidRequest
from shared.artifacts.mindie_shm import LARGEST_CODE, NAMES_FIELD
from tessera.preprocess.v1.preprocess_pb2 import Message, PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_LONGEST_NAME = 256
_LONGEST_PATH = 4096
_NO_CALLS = "is the form of an older API: send it as `tool_calls`"
_NO_AUDIO = "names a spoken answer, and answers are text alone: send what was said as `content`"


def read_chat(body: ChatRequest, model: ServedModel) -> ValidRequest:
    """POST /v1/chat/completions. Raises InvalidRequest naming the field, or NotFound."""
    if body.echo:
        raise unsupported("echo", "is for completions: leave it out or send false")
    tools = read_tools(body, model.forms, takes_custom=True)
    prompt = conversation_prompt(read_conversation(body, tools), model)
    logprobs = chat_logprobs(body.logprobs, body.top_logprobs, model.max_logprobs)
    valid = read_generation(body, prompt, ReplyKind.REPLY_KIND_CHAT, logprobs, model)
    return divided(
        valid,
        body,
        tools,
        model,
        single_call=body.parallel_tool_calls is False,
        hides_reasoning=body.include_reasoning is False,
    )


def read_completions(body: CompletionRequest, model: ServedModel) -> list[ValidRequest]:
    """POST /v1/completions: a request for each prompt. Raises InvalidRequest naming the field, or NotFound."""
    refuse_tools(body)
    logprobs = completion_logprobs(body.logprobs, body.top_logprobs, model.max_logprobs)
    kind = ReplyKind.REPLY_KIND_COMPLETION
    prompts = [mindie] if (mindie := _mindie(body, model)) else _prompts(body, model)
    check_copies(body, len(prompts))
    requests = [read_generation(body, prompt, kind, logprobs, model) for prompt in prompts]
    check_form_copies(requests)
    return requests


class HasMessages(Protocol):
    """A body with a conversation."""

    messages: list[ChatMessage] | None


def media_urls(body: HasMessages) -> Iterator[str]:
    """The URLs that media are read from."""
    for message in body.messages or ():
        for part in message.content if isinstance(message.content, list) else ():
            for value in (part.image_url, part.video_url, part.image, part.video):
                url = value.url if isinstance(value, MediaUrl) else value
                if url is not None:
                    yield url
            if part.file is not None and part.file.file_data is not None:
                yield part.file.file_data


def completion_media_urls(body: CompletionRequest) -> Iterator[str]:
    """The URLs that media of a completion's prompt are read from."""
    if body.multi_modal_data is not None:
        yield from (url for _, _, url in body.multi_modal_data.listed())


def read_conversation(body: ChatRequest | TokenizeRequest, tools: Tools) -> PrepareRequest:
    """The messages and template settings, to be prepared. Raises InvalidRequest naming the field."""
    listed = body.messages or ()
    check_sizes([len(m.content) if isinstance(m.content, list) else 0 for m in listed])
    prepare = PrepareRequest()
    # Filled in place: protobuf copies what is assigned.
    conversation = prepare.conversation
    conversation.chat_template_kwargs_json = object_text(
        "chat_template_kwargs", body.chat_template_kwargs, LONGEST_TEMPLATE_KWARGS
    )
    conversation.add_generation_prompt = body.add_generation_prompt is not False
    conversation.tools_json = tools.json
    read_template_fields(body, conversation)
    if conversation.continue_final_message:
        conversation.add_generation_prompt = _opens_a_turn(body.add_generation_prompt)
    for index, message in enumerate(listed):
        _read_message(message, f"messages[{index}]", conversation.messages.add())
    names = list(_item_names(listed))
    if any(names):
        conversation.item_names.extend(names)
    return prepare


def _item_names(messages: Sequence[ChatMessage]) -> Iterator[str]:
    """Of all media, in their order; empty for those without."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            is_text = part.text is not None if part.type is None else part.type == "text"
            if not is_text:
                yield part.uuid or ""


def _read_message(message: ChatMessage, path: str, into: Message) -> None:
    into.role = read_role(message.role, path)
    if not is_off(message.function_call):
        raise unsupported(f"{path}.function_call", _NO_CALLS)
    if not is_off(message.audio):
        raise unsupported(f"{path}.audio", _NO_AUDIO)
    into.name = text(f"{path}.name", message.name, _LONGEST_NAME)
    calls = enumerate(message.tool_calls or ())
    called = (_called(call, f"{path}.tool_calls[{index}]") for index, call in calls)
    into.tool_calls_json = read_calls(called, f"{path}.tool_calls")
    into.tool_call_id = read_call_id(message.tool_call_id, f"{path}.tool_call_id")
    into.reasoning = message.reasoning_content or message.reasoning or ""
    if isinstance(message.content, str):
        into.content.add(text=message.content)
        into.is_string = True
    elif message.content:
        for index, part in enumerate(message.content):
            into.content.append(read_part(part, f"{path}.content[{index}]"))
    elif into.tool_calls_json:
        into.is_string = True
    else:
        raise wrong(f"{path}.content", "must be a string or a list of at least one part")


def _called(call: ToolCall, path: str) -> Called:
    if call.custom is not None:
        if not call.custom.name:
            raise wrong(f"{path}.custom.name", "is missing")
        return Called(call.id, call.custom.name, as_arguments(call.custom.input or ""))
    function = call.function or CalledFunction()
    given = bytes(function.arguments)
    if given.startswith(b'"'):
        return Called(call.id, function.name, json.loads(given))
    return Called(call.id, function.name, "" if given == b"null" else given.decode())


def _opens_a_turn(asked: bool | None) -> bool:
    """Raises InvalidRequest where a new turn is asked for beside going on with the last message."""
    if asked:
        raise wrong(
            "add_generation_prompt",
            "cannot be true beside continue_final_message: the last message is gone on with",
        )
    return False


def _prompts(body: CompletionRequest, model: ServedModel) -> list[Prompt]:
    prompt = body.prompt
    if body.multi_modal_data is not None:
        if not isinstance(prompt, str):
            raise wrong("multi_modal_data", "is for one prompt that is a text")
        return [marked_prompt(prompt, body.multi_modal_data, "multi_modal_data", model)]
    if prompt is None:
        raise wrong(
            "prompt",
            "is missing: send a text or a list of token ids; conversations go to /v1/chat/completions",
        )
    if isinstance(prompt, str):
        return [text_prompt(prompt)]
    if not prompt or not isinstance(prompt[0], (str, list)):
        return [_one_prompt(prompt, "prompt", model)]
    if len(prompt) > model.max_prompts:
        raise wrong(
            "prompt",
            f"must not hold more than {model.max_prompts} prompts, not {len(prompt)}: send several"
            " requests",
        )
    if len(prompt) == 1:
        return [_one_prompt(prompt[0], "prompt", model)]
    return [_one_prompt(one, f"prompt[{i}]", model) for i, one in enumerate(prompt)]


def _mindie(body: CompletionRequest, model: ServedModel) -> Prompt | None:
    """The prompt with pictures in shared memory, if it is one."""
    names = text(NAMES_FIELD, body.shm_name_save_path, _LONGEST_PATH)
    ids: Any = body.prompt
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        [ids] = ids
    if not _holds_codes(ids):
        if names:
            raise wrong(
                NAMES_FIELD, "is for one prompt of token ids with pictures in shared memory"
            )
        return None
    if body.echo:
        raise wrong("echo", "cannot be combined with pictures in shared memory")
    return mindie_prompt(ids, names, model)


def _holds_codes(ids: object) -> bool:
    return (
        isinstance(ids, list)
        and bool(ids)
        and {*map(type, ids)} == {int}
        and min(ids) <= LARGEST_CODE
    )


def _one_prompt(prompt: object, field: str, model: ServedModel) -> Prompt:
    if isinstance(prompt, str):
        return text_prompt(prompt)
    if not isinstance(prompt, list):
        raise wrong(field, "must be a string, or a list of token ids")
    if not {*map(type, prompt)} <= {int, float}:
        index = next(i for i, item in enumerate(prompt) if type(item) not in (int, float))
        raise wrong(f"{field}[{index}]", "must be a whole number", "INVALID_TYPE")
    return ids_prompt(prompt, model, field)
