"""`context_management`: what is left out of earlier turns before the model sees them."""

import json

from services.gateway.api.anthropic.schema import ContextEdit, ContextManagement
from services.gateway.decoding.bounds import wrong
from services.gateway.reading.fields.unsupported import unsupported
from tessera.preprocess.v1.preprocess_pb2 import Conversation

_CLEARS_THINKING = "clear_thinking_20251015"
_KEEPS = "thinking_turns"


def edit(asked: ContextManagement | None, conversation: Conversation) -> None:
    """Leaves out what it says. Raises InvalidRequest naming the field."""
    if asked is None:
        return
    for index, one in enumerate(asked.edits or ()):
        path = f"context_management.edits[{index}]"
        if one.type != _CLEARS_THINKING:
            raise unsupported(
                f"{path}.type",
                f"must be {_CLEARS_THINKING}, not {str(one.type)[:64]!r}: of earlier turns this server clears thoughts"
                " alone; leave it out",
            )
        kept = _kept(one, path)
        thought = [message for message in conversation.messages if message.reasoning]
        if kept is not None:
            for message in thought[: max(0, len(thought) - kept)]:
                message.reasoning = ""


def _kept(one: ContextEdit, path: str) -> int | None:
    """How many turns keep their thoughts: the last ones; None is all of them."""
    given = json.loads(bytes(one.keep) or b"null")
    if given is None:
        return 1
    if given == "all":
        return None
    value = given.get("value") if isinstance(given, dict) and given.get("type") == _KEEPS else None
    if type(value) is not int or value < 1:
        raise wrong(
            f"{path}.keep", f'must be "all", or {{"type": "{_KEEPS}", "value": ...}} of at least 1'
        )
    return value
