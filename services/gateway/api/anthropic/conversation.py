"""From Anthropic's messages, whose blocks may be of all kinds, to those that chat templates know."""

from collections.abc import Sequence

from services.gateway.api.anthropic.schema import Block, CountBody, Source, Turn
from services.gateway.decoding.bounds import text, wrong
from services.gateway.reading.calls.earlier import Called, read_call_id, read_calls
from services.gateway.reading.conversation import check_sizes
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.reading.media.media import read_image_base64, read_image_url
from tessera.preprocess.v1.preprocess_pb2 import Conversation, Media, Message

_LONGEST_SIGNATURE = 1 << 16
_NOT_TAKEN = {
    "document": "this server takes no documents but text: send it as a block of text",
    "redacted_thinking": "leave it out: it comes from another server",
    "search_result": "send it as a block of text",
}
_SHOWN = ("text", "image")
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
    for name in ("citations", "toolset_name"):
        if not is_off(getattr(block, name), []):
            raise unsupported(f"{path}.{name}", "is not taken: leave it out")
    return kind


def _show(block: Block, path: str, into: Message) -> None:
    """Text or a picture."""
    if block.type == "text":
        if block.text is None:
            raise wrong(f"{path}.text", "is missing")
        into.content.add(text=block.text)
        return
    if block.source is None:
        raise wrong(f"{path}.source", "is missing")
    into.content.add(media=_picture(block.source, f"{path}.source"))


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
        case _:
            raise wrong(f"{path}.type", "must be base64 or url")
