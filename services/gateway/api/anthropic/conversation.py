"""From Anthropic's messages, whose blocks may be of all kinds, to those that chat templates know."""

from collections.abc import Sequence

from services.gateway.api.anthropic.schema import Block, CountBody, Source, Turn
from services.gateway.decoding.bounds import text, wrong
from services.gateway.reading.calls.earlier import Called, read_call_id, read_calls
from services.gateway.reading.conversation import check_sizes
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.reading.media.media import (
    read_image_base64,
    read_image_url,
    read_sent_file,
)
from tessera.preprocess.v1.preprocess_pb2 import Conversation, Media, Message

_LONGEST_SIGNATURE = 1 << 16
_NOT_TAKEN = {
    "redacted_thinking": "leave it out: it comes from another server",
    "container_upload": "this server runs no code: send what is to be read as a block of text",
}
_SHOWN = ("text", "image", "document", "search_result")
_OF_ROLE = {
    "user": (*_SHOWN, "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


def read_messages(body: CountBody, conversation: Conversation) -> None:
    """Fills in the messages, and how the answer goes on: with the last one, where that is the assistant's. Raises
    InvalidRequest naming the field.
    """
    listed = body.messages or ()
    check_sizes([len(turn.content) if isinstance(turn.content, list) else 1 for turn in listed])
    if body.system:
        _system(body.system, "system", conversation.messages.add())
    for index, turn in enumerate(listed):
        _read_turn(turn, f"messages[{index}]", conversation)
    goes_on = conversation.messages[-1].role == "assistant"
    if goes_on and conversation.messages[-1].tool_calls_json:
        raise wrong(
            f"messages[{len(listed) - 1}]",
            "ends with a call: send what it gave as a tool_result of the user's",
        )
    conversation.continue_final_message = goes_on
    conversation.add_generation_prompt = not goes_on


def _read_turn(turn: Turn, path: str, conversation: Conversation) -> None:
    if turn.role not in _OF_ROLE:
        what = "is missing: it" if turn.role is None else ""
        raise wrong(f"{path}.role", f"{what} must be user, assistant or system".strip())
    content = turn.content
    if content is None or content == []:
        raise wrong(f"{path}.content", "must be a string or a list of at least one block")
    if turn.role == "system":
        _system(content, f"{path}.content", conversation.messages.add())
    elif isinstance(content, str):
        _plain(conversation.messages.add(), turn.role, content)
    elif turn.role == "assistant":
        _assistant(content, f"{path}.content", conversation.messages.add())
    else:
        _user(content, f"{path}.content", conversation)


def _plain(into: Message, role: str, content: str) -> None:
    into.role, into.is_string = role, True
    into.content.add(text=content)


def _system(content: str | list[Block], path: str, into: Message) -> None:
    if isinstance(content, str):
        _plain(into, "system", content)
        return
    into.role = "system"
    for index, block in enumerate(content):
        _check(block, f"{path}[{index}]", "system")
        _show(block, f"{path}[{index}]", into)


def _assistant(blocks: Sequence[Block], path: str, into: Message) -> None:
    into.role = "assistant"
    calls: list[Called] = []
    for index, block in enumerate(blocks):
        at = f"{path}[{index}]"
        match _check(block, at, "assistant"):
            case "thinking":
                text(f"{at}.signature", block.signature, _LONGEST_SIGNATURE)
                into.reasoning += block.thinking or ""
            case "tool_use":
                calls.append(_called(block, at))
            case _:
                _show(block, at, into)
    into.tool_calls_json = read_calls(calls, path)
    into.is_string = not into.content


def _called(block: Block, path: str) -> Called:
    if not block.name:
        raise wrong(f"{path}.name", "is missing")
    given = bytes(block.input)
    if not given.startswith(b"{"):
        raise wrong(f"{path}.input", "must be an object", "INVALID_TYPE")
    return Called(read_call_id(block.id, f"{path}.id"), block.name, given.decode())


def _user(blocks: Sequence[Block], path: str, conversation: Conversation) -> None:
    """What tools gave becomes messages of their own; what stands between them, of the user's."""
    spoken: Message | None = None
    for index, block in enumerate(blocks):
        at = f"{path}[{index}]"
        if _check(block, at, "user") == "tool_result":
            spoken = None
            _tool_result(block, at, conversation.messages.add())
            continue
        if spoken is None:
            spoken = conversation.messages.add(role="user")
        _show(block, at, spoken)


def _tool_result(block: Block, path: str, into: Message) -> None:
    into.role = "tool"
    if not block.tool_use_id:
        raise wrong(f"{path}.tool_use_id", "is missing")
    into.tool_call_id = read_call_id(block.tool_use_id, f"{path}.tool_use_id")
    if isinstance(block.content, list):
        check_sizes([len(block.content)])
        for index, inner in enumerate(block.content):
            at = f"{path}.content[{index}]"
            _check(inner, at, "")
            _show(inner, at, into)
    if not into.content:
        content = block.content if isinstance(block.content, str) else ""
        into.is_string = True
        into.content.add(text=content)


def _check(block: Block, path: str, role: str) -> str:
    """The type of a block, which messages of this role may have; an empty role is the content of a tool_result."""
    kind, allowed = block.type or "", _OF_ROLE.get(role, _SHOWN)
    if kind not in allowed:
        hint = f": {_NOT_TAKEN[kind]}" if kind in _NOT_TAKEN else ""
        what = f"not {kind[:32]!r}" if kind else "and is missing"
        raise wrong(f"{path}.type", f"must be one of {', '.join(allowed)}, {what}{hint}")
    for name in ("citations", "toolset_name", "data", "file_id"):
        if not is_off(getattr(block, name), [], {"enabled": False}):
            raise unsupported(f"{path}.{name}", "is not taken: leave it out")
    return kind


def _show(block: Block, path: str, into: Message) -> None:
    """Text, a picture, or what is shown as text."""
    if block.type == "text":
        if block.text is None:
            raise wrong(f"{path}.text", "is missing")
        into.content.add(text=block.text)
        return
    if block.source is None:
        raise wrong(f"{path}.source", "is missing")
    if block.type == "search_result":
        if not isinstance(block.source, str):
            raise wrong(f"{path}.source", "must be a string", "INVALID_TYPE")
        said = _texts(block.content, f"{path}.content")
        into.content.add(text=_titled(block.title, block.source, said))
    elif isinstance(block.source, str):
        raise wrong(f"{path}.source", "must be an object, not a string", "INVALID_TYPE")
    elif block.type == "document":
        said = _document(block.source, f"{path}.source")
        into.content.add(text=_titled(block.title, block.context, said))
    else:
        into.content.add(media=_picture(block.source, f"{path}.source"))


def _document(source: Source, path: str) -> str:
    match source.type:
        case "text":
            if source.data is None:
                raise wrong(f"{path}.data", "is missing")
            return source.data
        case "content":
            return _texts(source.content, f"{path}.content")
        case _:
            raise wrong(
                f"{path}.type", "must be text or content: this server reads no documents but text"
            )


def _texts(content: str | list[Block] | None, path: str) -> str:
    """What blocks of text say, each on lines of its own."""
    if content is None:
        raise wrong(path, "is missing")
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise wrong(f"{path}[{index}]", "must be a block of text")
    return "\n".join(block.text or "" for block in content)


def _titled(title: str | None, about: str | None, said: str) -> str:
    """A document as text: what is told of it stands before it."""
    return "\n".join(line for line in (title, about, said) if line)


def _picture(source: Source, path: str) -> Media:
    match source.type:
        case "base64":
            if source.data is None:
                raise wrong(f"{path}.data", "is missing")
            kind = source.media_type or "image/"
            if not kind.startswith("image/"):
                raise wrong(f"{path}.media_type", f"must be that of an image, not {kind[:64]!r}")
            return read_image_base64(source.data, f"{path}.data")
        case "url":
            if source.url is None:
                raise wrong(f"{path}.url", "is missing")
            return read_image_url(source.url, f"{path}.url")
        case "file":
            return read_sent_file(source.file_id, f"{path}.file_id")
        case _:
            raise wrong(f"{path}.type", "must be base64, url or file")
