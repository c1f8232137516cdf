"""Going on with the last message of a conversation: what is rendered ends where its text does."""

from typing import Any

from shared.errors import InvalidRequest

# Put behind the text of the last message, so that its end is found in what the template writes: a private-use
# character, and a space that templates which trim take away.
_END = "\U000f5a1e"
_FIELD = "continue_final_message"


def mark_end(messages: list[dict[str, Any]]) -> None:
    """Marks the end of the last message's text. Raises InvalidRequest where it has none."""
    last = messages[-1]
    content = last["content"]
    if isinstance(content, str):
        last["content"] = f"{content}{_END} "
        return
    texts = [part for part in content or () if "text" in part]
    if not texts:
        raise _wrong("the last message has no text to go on with")
    texts[-1]["text"] += f"{_END} "


def cut_at_end(text: str) -> str:
    """What a template has written up to the mark. Raises InvalidRequest where it left the text out."""
    before, mark, behind = text.rpartition(_END)
    if not mark:
        raise _wrong("the chat template leaves the text of the last message out, or changes it")
    return before if behind.startswith(" ") else before.rstrip()


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest("NO_OPEN_MESSAGE", f"{_FIELD}: {message}", field=_FIELD)
