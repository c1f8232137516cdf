"""What an earlier turn has beside its content: calls of tools, the call that it answers, what was thought."""

import hashlib
import re
from collections.abc import Callable
from typing import Any

from services.preprocess.prompt.json_fields import bad_json, read_json
from tessera.preprocess.v1.preprocess_pb2 import Message

# Templates that take names of calls in one form alone: nine letters and digits.
_SHORT_IDS = re.compile(r"\|\s*length\s*!=\s*9")
# Templates that know a turn of calls by its having no content.
_NO_CONTENT = re.compile(r"content['\"]?\]?\s+is\s+none")


def add_fields(
    written: dict[str, Any],
    message: Message,
    index: int,
    guard: Callable[[Any], Any],
    template: str,
) -> None:
    """Puts the fields of the message at `index` into what the template gets, all strings guarded. Raises
    InvalidRequest.
    """
    if message.tool_calls_json:
        field = f"messages[{index}].tool_calls"
        calls = read_json(message.tool_calls_json, field)
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise bad_json(field, "is not a JSON list of objects")
        for call in calls:
            if "id" in call:
                call["id"] = _call_id(str(call["id"]), template)
        written["tool_calls"] = guard(calls)
        if not message.content:
            written["content"] = None if _NO_CONTENT.search(template) else ""
    if message.tool_call_id:
        written["tool_call_id"] = guard(_call_id(message.tool_call_id, template))
    if message.reasoning:  # templates know it by one of these names
        written["reasoning_content"] = written["reasoning"] = guard(message.reasoning)


def _call_id(name: str, template: str) -> str:
    """The name as the template takes it: equal ones stay equal."""
    if not _SHORT_IDS.search(template) or re.fullmatch("[A-Za-z0-9]{9}", name):
        return name
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:9]
