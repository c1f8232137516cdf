"""From a list of items, of which each is a message, a call, what a call gave, or a thought, to the messages that chat
templates know: what an assistant said, thought and called one after another is one message.
"""

from collections.abc import Sequence

from services.gateway.api.responses.compaction_items import TYPE as COMPACTION
from services.gateway.api.responses.compaction_items import opened
from services.gateway.api.responses.schema import ContentPart, Item
from services.gateway.decoding.bounds import at_most, text, wrong
from services.gateway.decoding.list_limits import LONGEST_TOOL_NAME, MOST_MESSAGES, MOST_PARTS
from services.gateway.reading.calls.custom_tools import as_arguments
from services.gateway.reading.calls.earlier import Called, read_call_id, read_calls
from services.gateway.reading.media.media import read_image_url, read_sent_file
from shared.prompts.roles import for_older_templates
from tessera.preprocess.v1.preprocess_pb2 import Conversation, Media, Message

_ROLES = ("user", "assistant", "system", "developer")
_DETAILS = (None, "auto", "low", "high", "original")
_CUSTOM = "custom_tool_call"
_TYPES = (
    "message", "function_call", "function_call_output", _CUSTOM, f"{_CUSTOM}_output", "reasoning", COMPACTION,
)  # fmt: skip
_SPOKEN = ("input_text", "input_image", "input_file")
_PICTURES = ("input_image", "input_file")
_SAID = ("output_text", "refusal", "input_text")
_LONGEST_ID = 256
_HINTS = {
    "item_reference": (
        "items are named by id in the list `input` alone, where the server keeps responses"
        " (--response-keep): send the item itself"
    ),
    "input_audio": "this server takes no sound",
}


def read_items(items: Sequence[Item], path: str, conversation: Conversation) -> None:
    """Adds the items at `path` to the conversation. Raises InvalidRequest naming the field."""
    at_most(path, len(items), MOST_MESSAGES)
    parts = sum(
        len(given)
        for item in items
        for given in (item.content, item.output)
        if isinstance(given, list)
    )
    at_most(path, parts, MOST_PARTS, "parts in all")
    turns = _Turns(conversation, path)
    for index, item in enumerate(items):
        turns.add(item, f"{path}[{index}]")
    turns.close()


def join_user_turns(conversation: Conversation) -> None:
    """Makes one message of neighbouring ones of the user's, which many chat templates refuse: there are such where what
    the assistant said between them has become a summary.
    """
    turns = [*conversation.messages]
    del conversation.messages[:]
    for turn in turns:
        into = conversation.messages[-1] if conversation.messages else None
        if into is None or not into.role == turn.role == "user":
            conversation.messages.append(turn)
        elif into.is_string and turn.is_string:
            into.content[0].text += f"\n\n{turn.content[0].text}"
        else:
            into.is_string = False
            into.content.add(text="\n\n")
            into.content.extend(turn.content)


class _Turns:
    """Puts together what belongs to one message of the assistant's."""

    def __init__(self, conversation: Conversation, path: str) -> None:
        self._messages = conversation.messages
        self._path = path
        self._own: Message | None = None
        self._calls: list[Called] = []

    def add(self, item: Item, path: str) -> None:
        """The next item."""
        text(f"{path}.id", item.id, _LONGEST_ID)
        match item.type:
            case None | "message":
                self._message(item, path)
            case "function_call" | "custom_tool_call":
                self._assistant()
                self._calls.append(_called(item, path))
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, path)
            case "reasoning":
                own = self._assistant()
                if own.content or self._calls:
                    self.close()
                    own = self._assistant()
                own.reasoning += _thought(item, path)
            case "compaction":
                self.close()
                said = opened(item.encrypted_content, f"{path}.encrypted_content")
                self._messages.add(role="user", is_string=True).content.add(text=said)
            case kind:
                hint = f": {_HINTS[kind]}" if kind in _HINTS else ""
                names = ", ".join(_TYPES)
                raise wrong(f"{path}.type", f"must be one of {names}, not {kind[:32]!r}{hint}")

    def close(self) -> None:
        """The assistant's message is whole."""
        if self._own is not None:
            self._own.tool_calls_json = read_calls(self._calls, self._path)
            self._own.is_string = not self._own.content
        self._own, self._calls = None, []

    def _assistant(self) -> Message:
        if self._own is None:
            self._own = self._messages.add(role="assistant")
        return self._own

    def _message(self, item: Item, path: str) -> None:
        if item.role not in _ROLES:
            what = "is missing: it" if item.role is None else ""
            raise wrong(f"{path}.role", f"{what} must be one of {', '.join(_ROLES)}".strip())
        if item.role != "assistant":
            self.close()
            into = self._messages.add(role=for_older_templates(item.role))
        else:
            if self._own is not None and (self._own.content or self._calls):
                self.close()
            into = self._assistant()
        _fill(into, item.content, f"{path}.content", _SAID if item.role == "assistant" else _SPOKEN)
        if item.role == "assistant" and isinstance(item.content, str):
            self.close()
            into.is_string = True

    def _output(self, item: Item, path: str) -> None:
        self.close()
        if not item.call_id:
            raise wrong(f"{path}.call_id", "is missing")
        into = self._messages.add(role="tool")
        into.tool_call_id = read_call_id(item.call_id, f"{path}.call_id")
        _fill(into, item.output, f"{path}.output", _SPOKEN)


def _fill(
    into: Message,
    content: str | list[ContentPart] | None,
    path: str,
    kinds: Sequence[str],
) -> None:
    if content is None:
        raise wrong(path, "must be a string or a list of parts")
    if isinstance(content, str):
        into.is_string = True
        into.content.add(text=content)
        return
    for index, part in enumerate(content):
        at = f"{path}[{index}]"
        if part.type not in kinds:
            kind = part.type or ""
            hint = f": {_HINTS[kind]}" if kind in _HINTS else ""
            raise wrong(f"{at}.type", f"must be one of {', '.join(kinds)}, not {kind[:32]!r}{hint}")
        if part.type in _PICTURES:
            into.content.add(media=_picture(part, at))
            continue
        said = part.refusal if part.type == "refusal" else part.text
        if said is None:
            raise wrong(f"{at}.{'refusal' if part.type == 'refusal' else 'text'}", "is missing")
        into.content.add(text=said)


def _picture(part: ContentPart, path: str) -> Media:
    """A file is taken where it is a picture."""
    if part.detail not in _DETAILS:
        raise wrong(f"{path}.detail", "must be auto, low, high or original")
    names = ("image_url",) if part.type == "input_image" else ("file_data", "file_url")
    given = [name for name in (*names, "file_id") if getattr(part, name) is not None]
    if not given:
        raise wrong(f"{path}.{names[0]}", "is missing")
    if len(given) > 1:
        raise wrong(f"{path}.{given[1]}", f"cannot be combined with {given[0]}: send one of them")
    field, value = f"{path}.{given[0]}", getattr(part, given[0])
    return read_sent_file(value, field) if given[0] == "file_id" else read_image_url(value, field)


def _called(item: Item, path: str) -> Called:
    if not item.name:
        raise wrong(f"{path}.name", "is missing")
    name = text(f"{path}.name", item.name, LONGEST_TOOL_NAME)
    if not item.call_id:
        raise wrong(f"{path}.call_id", "is missing")
    given = as_arguments(item.input or "") if item.type == _CUSTOM else item.arguments or ""
    return Called(read_call_id(item.call_id, f"{path}.call_id"), name, given)


def _thought(item: Item, path: str) -> str:
    if isinstance(item.content, str):
        raise wrong(f"{path}.content", "must be a list of parts", "INVALID_TYPE")
    parts = item.content or item.summary or ()
    return "".join(part.text or "" for part in parts)
