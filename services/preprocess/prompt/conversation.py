"""From a client's conversation to what its chat template is given."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from services.preprocess.prompt.chat_template import ChatTemplate
from services.preprocess.prompt.json_fields import bad_json, read_json
from services.preprocess.prompt.tokenizer import PromptTokenizer
from services.preprocess.prompt.turns import add_fields
from shared.errors import InvalidRequest
from shared.prompts.modality import NAMES, VIDEO, read_modality
from shared.prompts.roles import SERVED, for_older_templates
from tessera.common.v1.media_pb2 import Modality
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    Media,
    Message,
    Part,
    Video,
)

# Of template variables those that are made of other fields of a request.
_TAKEN = frozenset({"messages", "add_generation_prompt", "tools"})


def media(conversation: Conversation, kept: Sequence[int] | None = None) -> list[Media | Video]:
    """The media in the order of the prompt; `kept`: those of these messages alone."""
    messages = conversation.messages
    found = (
        item_of(part)
        for message in (messages if kept is None else map(messages.__getitem__, kept))
        for part in message.content
    )
    return [item for item in found if item is not None]


def item_of(part: Part) -> Media | Video | None:
    """The media item that a part is; None for a text."""
    match part.WhichOneof("part"):
        case "media":
            return part.media
        case "video":
            return part.video
        case _:
            return None


def modality_of(item: Media | Video) -> Modality.ValueType:
    """Its modality. Raises InvalidRequest naming its field for one that is not served, or is none of a video."""
    if not isinstance(item, Video):
        return read_modality(item.modality, item.field or "media")
    field = item.field or NAMES[VIDEO]
    if (found := read_modality(item.modality, field, unset=VIDEO)) != VIDEO:
        raise InvalidRequest(
            "BAD_MODALITY",
            f"{field}: frames or a file of a video cannot be of modality {found} ({NAMES[found]})",
            field=field,
        )
    return found


def template_messages(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: PromptTokenizer,
    markers: Mapping[str, str],
    kept: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """The messages, or those of them in `kept`, in the shape that the template expects, the client's words guarded.

    `markers` by kind (the names of modalities): where the template cannot render a kind, its marker is put in the text
    at the item's place; an empty one is left out.
    Raises InvalidRequest for an unknown role, an unknown modality or an empty part.
    """
    if not conversation.messages:
        raise InvalidRequest("NO_MESSAGES", "messages: at least one is needed", field="messages")
    as_parts = {k for k, marker in markers.items() if template.renders_media(k, marker)}
    messages = []
    for index in range(len(conversation.messages)) if kept is None else kept:
        message = conversation.messages[index]
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
        add_fields(
            written, message, index, partial(_guard_all, tokenizer=tokenizer), template.source
        )
        messages.append(written)
    return messages


class PromptPiece(NamedTuple):
    """A client's words, or what stands for a media item."""

    text: str
    is_media: bool


def prompt_pieces(
    conversation: Conversation, template: ChatTemplate | None, markers: Mapping[str, str]
) -> list[PromptPiece]:
    """The parts of a prompt as it stands. `markers` as in `template_messages`: around one goes what the model's
    template writes there. Raises InvalidRequest for an unknown modality, an empty part or several messages.
    """
    if len(conversation.messages) != 1:
        raise InvalidRequest("NO_PROMPT", "prompt: one message holds its parts", field="prompt")
    pieces = []
    for number, part in enumerate(conversation.messages[0].content):
        if (item := item_of(part)) is not None:
            kind = NAMES[modality_of(item)]
            marker = markers.get(kind, "")
            written = template.media_text(kind, marker) if template and marker else marker
            pieces.append(PromptPiece(written, is_media=True))
        elif part.WhichOneof("part") == "text":
            pieces.append(PromptPiece(part.text, is_media=False))
        else:
            field = f"prompt[{number}]"
            raise InvalidRequest("EMPTY_PART", f"{field} is empty", field=field)
    return pieces


def template_variables(conversation: Conversation, tokenizer: PromptTokenizer) -> dict[str, Any]:
    """The request's own template variables, its tools and documents, their strings guarded. Raises InvalidRequest."""
    variables: dict[str, Any] = {}
    if conversation.chat_template_kwargs_json:
        field = "chat_template_kwargs"
        given = read_json(conversation.chat_template_kwargs_json, field)
        if not isinstance(given, dict):
            raise bad_json(field, "is not a JSON object")
        if taken := _TAKEN & given.keys():
            name = min(taken)
            raise bad_json(field, f"cannot set {name}: the request has a field of that name")
        variables = {name: _guard_all(value, tokenizer) for name, value in given.items()}
    for name, given in (
        ("tools", conversation.tools_json),
        ("documents", conversation.documents_json),
    ):
        listed = read_json(given, name) if given else []
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise bad_json(name, "is not a JSON list of objects")
        if listed:
            variables[name] = _guard_all(listed, tokenizer)
    return variables


def _role(message: Message, index: int, template: ChatTemplate) -> str:
    if message.role not in SERVED:
        field = f"messages[{index}].role"
        raise InvalidRequest(
            "BAD_ROLE",
            f"{field}: {message.role!r} is not one of {', '.join(SERVED)}",
            field=field,
        )
    return message.role if template.knows(message.role) else for_older_templates(message.role)


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
        if part.WhichOneof("part") == "text":
            yield {"type": "text", "text": next(guarded)}
        elif (item := item_of(part)) is not None:
            kind = NAMES[modality_of(item)]
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
    if isinstance(value, dict):  # templates write names as well
        return {tokenizer.guard(key): _guard_all(inner, tokenizer) for key, inner in value.items()}
    if isinstance(value, list):
        return [_guard_all(inner, tokenizer) for inner in value]
    return value
