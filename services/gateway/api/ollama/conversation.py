"""From Ollama's messages to those that chat templates know."""

import json
from collections.abc import Sequence
from typing import Any

from services.gateway.api.ollama.schema import CalledFunction, GeneratingBody, ToolCall, Turn
from services.gateway.decoding.bounds import text, wrong
from services.gateway.decoding.list_limits import LONGEST_TOOL_NAME
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.earlier import Called, read_call_id, read_calls
from services.gateway.reading.conversation import check_sizes, read_role
from services.gateway.reading.fields.unsupported import unsupported
from services.gateway.reading.media.media import read_image_base64
from tessera.preprocess.v1.preprocess_pb2 import Conversation, Message, PrepareRequest

_EFFORTS = ("low", "medium", "high", "max")


def opened(body: GeneratingBody, model: ServedModel) -> PrepareRequest:
    """A conversation without messages. Raises InvalidRequest for a `think` that cannot be given."""
    prepare = PrepareRequest()
    prepare.conversation.add_generation_prompt = True
    told: dict[str, Any] = {}
    if body.think is not None:
        told["enable_thinking"] = body.think is not False
    if isinstance(body.think, str):
        if body.think not in _EFFORTS:
            raise wrong("think", f"must be true, false or one of {', '.join(_EFFORTS)}")
        told["reasoning_effort"] = body.think
    if body.think and model.forms.reasoning is None:
        raise unsupported(
            "think",
            "asks for thoughts apart from the answer, and how this model marks what it thinks is not known: leave it"
            " out, or start the server with --reasoning-parser",
        )
    if told:
        prepare.conversation.chat_template_kwargs_json = json.dumps(told)
    return prepare


def fill_turns(turns: Sequence[Turn], conversation: Conversation) -> None:
    """Fills in the messages. Raises InvalidRequest naming the field."""
    check_sizes([len(turn.images or ()) + 1 for turn in turns])
    # Calls that have no result yet, as (name of the call, of the tool).
    waiting: list[tuple[str, str]] = []
    for index, turn in enumerate(turns):
        path, into = f"messages[{index}]", conversation.messages.add()
        role = read_role(turn.role, path)
        called = list(_called(turn.tool_calls or (), index))
        into.tool_calls_json = read_calls(called, f"{path}.tool_calls")
        if called:
            waiting = [(call.id or "", call.tool or "") for call in called]
        into.reasoning = turn.thinking or ""
        into.name = text(f"{path}.tool_name", turn.tool_name, LONGEST_TOOL_NAME)
        into.tool_call_id = read_call_id(turn.tool_call_id, f"{path}.tool_call_id")
        if role == "tool" and not into.tool_call_id:
            into.tool_call_id = _answered(into.name, waiting)
        if turn.content is None and not turn.images and not called:
            raise wrong(f"{path}.content", "is missing")
        fill(into, role, turn.content or "", turn.images or (), f"{path}.images")


def fill(
    into: Message, role: str, content: str, images: Sequence[str] = (), path: str = ""
) -> None:
    """A message: the pictures stand before the text, as in Ollama."""
    into.role = role
    for index, image in enumerate(images):
        field = f"{path}[{index}]"
        into.content.add(media=read_image_base64(image, field))
    if content or not (images or into.tool_calls_json):
        into.content.add(text=content)
    into.is_string = not images


def _called(calls: Sequence[ToolCall], turn: int) -> Sequence[Called]:
    """Calls have names here, for templates that show them: Ollama's clients may leave them out."""
    found = []
    for index, call in enumerate(calls):
        function = call.function or CalledFunction()
        given = bytes(function.arguments)
        arguments = "" if given == b"null" else given.decode()
        if given.startswith(b'"'):
            arguments = json.loads(given)
        found.append(Called(call.id or f"call_{turn}_{index}", function.name, arguments))
    return found


def _answered(tool: str, waiting: list[tuple[str, str]]) -> str:
    """The name of the call that a result answers, which is then no longer among those that wait: of its tool, else the
    first one; empty where none waits."""
    for place, (name, called) in enumerate(waiting):
        if tool in ("", called):
            del waiting[place]
            return name
    return ""
