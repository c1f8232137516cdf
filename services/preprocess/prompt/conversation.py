"""From a client's conversation to what its chat template is given."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from services.preprocess.prompt.chat_template import ROLES, ChatTemplate
from services.preprocess.prompt.tokenizer import PromptTokenizer
from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import Conversation, Media, Message, Video

# Of `chat_template_kwargs`. What is nested deeper than this overflows stacks, and its text form grows with each level.
_MOST_DEPTH = 32
_MOST_CHARACTERS = 1 << 16
# A string as a whole (or what is left of the text, where it does not end), or a bracket.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|$)|[\[\]{}]', re.DOTALL)


def media(conversation: Conversation) -> list[Media | Video]:
    """The images and videos in the order of the prompt."""
    return [
        part.image if part.WhichOneof("part") == "image" else part.video
        for message in conversation.messages
        for part in message.content
        if part.WhichOneof("part") in ("image", "video")
    ]


def template_messages(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: PromptTokenizer,
    markers: Mapping[str, str],
) -> list[dict[str, Any]]:
    """The messages in the shape that the template expects, the client's words guarded.

    `markers` by kind ("image", "video"): where the template cannot render a kind, its marker is put in the text at
    the item's place; an empty one is left out.
    Raises InvalidRequest for an unknown role or an empty part.
    """
    if not conversation.messages:
        raise InvalidRequest("NO_MESSAGES", "messages: at least one is needed", field="messages")
    as_parts = {k for k, marker in markers.items() if template.renders_media(k, marker)}
    messages = []
    for index, message in enumerate(conversation.messages):
        role = _role(message, index, template)
        parts = list(
            _parts(message, index, tokenizer, markers, as_parts if role == "user" else set())
        )
        as_text = message.is_string and template.takes_text[role]
        if as_text or not template.takes_parts[role]:
            # vLLM's way of writing several parts as one string.
            content: Any = "\n".join(part["text"] for part in parts)
        else:
            content = parts
        written: dict[str, Any] = {"role": role, "content": content}
        if message.name:
            written["name"] = tokenizer.guard(message.name)
        messages.append(written)
    return messages


def template_variables(conversation: Conversation, tokenizer: PromptTokenizer) -> dict[str, Any]:
    """The request's own template variables, their strings guarded. Raises InvalidRequest."""
    if not conversation.chat_template_kwargs_json:
        return {}
    field = "chat_template_kwargs"
    text = conversation.chat_template_kwargs_json
    if len(text) > _MOST_CHARACTERS:
        raise InvalidRequest(
            "BAD_JSON",
            f"{field} has {len(text)} characters of JSON, the limit is {_MOST_CHARACTERS}",
            field=field,
        )
    if _depth(text) > _MOST_DEPTH:
        raise InvalidRequest(
            "BAD_JSON", f"{field} is nested deeper than {_MOST_DEPTH} levels", field=field
        )
    try:
        variables = json.loads(text)
    except ValueError as error:
        raise InvalidRequest("BAD_JSON", f"{field} is not JSON: {error}", field=field) from error
    if not isinstance(variables, dict):
        raise InvalidRequest("BAD_JSON", f"{field} is not a JSON object", field=field)
    taken = {"messages", "add_generation_prompt"} & variables.keys()
    if taken:
        raise InvalidRequest("BAD_JSON", f"{field} cannot set {sorted(taken)[0]}", field=field)
    guarded: dict[str, Any] = _guard_all(variables, tokenizer)
    return guarded


def _depth(text: str) -> int:
    """How deep the brackets of a JSON text nest at most; those in strings do not count."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in "]}":
            depth -= 1
    return deepest


def _role(message: Message, index: int, template: ChatTemplate) -> str:
    if message.role not in ROLES:
        field = f"messages[{index}].role"
        raise InvalidRequest(
            "BAD_ROLE",
            f"{field}: {message.role!r} is not one of {', '.join(ROLES)}",
            field=field,
        )
    if message.role == "developer" and not template.knows_developer:
        return "system"  # what the role is called since OpenAI's newer models
    return message.role


def _parts(
    message: Message,
    index: int,
    tokenizer: PromptTokenizer,
    markers: Mapping[str, str],
    as_parts: Collection[str],
) -> Iterator[dict[str, str]]:
    texts = [part.text for part in message.content if part.WhichOneof("part") == "text"]
    guarded = iter(tokenizer.guard_parts(texts))
    for number, part in enumerate(message.content):
        kind = part.WhichOneof("part")
        if kind == "text":
            yield {"type": "text", "text": next(guarded)}
        elif kind is not None:
            if kind in as_parts:
                yield {"type": kind}
            elif marker := markers.get(kind):
                yield {"type": "text", "text": marker}
        else:
            field = f"messages[{index}].content[{number}]"
            raise InvalidRequest("EMPTY_PART", f"{field} is empty", field=field)


def _guard_all(value: Any, tokenizer: PromptTokenizer) -> Any:
    if isinstance(value, str):
        return tokenizer.guard(value)
    if isinstance(value, dict):
        return {key: _guard_all(inner, tokenizer) for key, inner in value.items()}
    if isinstance(value, list):
        return [_guard_all(inner, tokenizer) for inner in value]
    return value
