"""Ollama's request bodies, checked and turned into our own types."""

from collections.abc import Sequence

from services.gateway.api.ollama.options import read_format, read_options
from services.gateway.api.ollama.schema import ChatBody, GenerateBody, GeneratingBody, Turn
from services.gateway.decoding.bounds import wrong
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.conversation import check_sizes, read_role
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.reading.generation import (
    Prompt,
    conversation_prompt,
    read_generation,
    text_prompt,
)
from services.gateway.reading.media.media import read_image_base64
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest
from tessera.preprocess.v1.preprocess_pb2 import Message, PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_NO_THINKING = '{"enable_thinking": false}'
_NO_TOOLS = "tool calling is not offered here yet: leave it out, and send what was called as text"


class OnlyLoads(Exception):
    """A valid request for no tokens: it has the model loaded, which it always is."""


def read_chat(body: ChatBody, model: ServedModel) -> tuple[ValidRequest, GenerationOptions]:
    """POST /api/chat. Raises InvalidRequest naming the field, NotFound, or OnlyLoads."""
    options = read_options(body, model)
    if not is_off(body.tools, []):
        raise unsupported(
            "tools", "asks for a tool call, which is not offered here yet: leave it out"
        )
    if not body.messages:
        raise OnlyLoads
    check_sizes([len(turn.images or ()) + 1 for turn in body.messages])
    prepare = _conversation(body)
    for index, turn in enumerate(body.messages):
        _read_turn(turn, f"messages[{index}]", prepare.conversation.messages.add())
    prompt = conversation_prompt(prepare, model)
    kind = ReplyKind.REPLY_KIND_OLLAMA_CHAT
    return read_generation(options, prompt, kind, None, model, read_format(body)), options


def read_generate(body: GenerateBody, model: ServedModel) -> tuple[ValidRequest, GenerationOptions]:
    """POST /api/generate. Raises InvalidRequest naming the field, NotFound, or OnlyLoads."""
    options = read_options(body, model)
    _check_generate(body)
    if not body.prompt:
        raise OnlyLoads
    prompt = text_prompt(body.prompt) if body.raw else _templated(body, body.prompt, model)
    kind = ReplyKind.REPLY_KIND_OLLAMA_GENERATE
    return read_generation(options, prompt, kind, None, model, read_format(body)), options


def _check_generate(body: GenerateBody) -> None:
    if body.raw and (body.system or not is_off(body.template, "") or not is_off(body.context, [])):
        raise wrong("raw", "mode does not support template, system, or context")
    if body.raw and body.images:
        raise unsupported(
            "images",
            "cannot be combined with raw: leave raw out, and the model's template places them",
        )
    if not is_off(body.suffix, ""):
        raise unsupported(
            "suffix", "asks for what goes before a text, and answers only go on behind `prompt`"
        )
    if not is_off(body.template, ""):
        raise unsupported(
            "template",
            "is not taken from requests: leave it out, or send a prompt in its form with raw: true",
        )
    if not is_off(body.context, []):
        raise unsupported("context", "is not taken: send the conversation to /api/chat")


def _templated(body: GenerateBody, prompt: str, model: ServedModel) -> Prompt:
    """A conversation of the prompt alone, behind its system message."""
    check_sizes([len(body.images or ()) + 2])
    prepare = _conversation(body)
    if body.system:
        _fill(prepare.conversation.messages.add(), "system", body.system)
    _fill(prepare.conversation.messages.add(), "user", prompt, body.images or (), "images")
    return conversation_prompt(prepare, model)


def _conversation(body: GeneratingBody) -> PrepareRequest:
    """One without messages."""
    prepare = PrepareRequest()
    prepare.conversation.add_generation_prompt = True
    if body.think is False:
        prepare.conversation.chat_template_kwargs_json = _NO_THINKING
    return prepare


def _read_turn(turn: Turn, path: str, into: Message) -> None:
    role = read_role(turn.role, path)
    for name in ("tool_calls", "tool_name", "tool_call_id"):
        if not is_off(getattr(turn, name), [], ""):
            raise unsupported(f"{path}.{name}", f"is of a tool call: {_NO_TOOLS}")
    if not is_off(turn.thinking, ""):
        raise unsupported(f"{path}.thinking", "is not shown to the model yet: leave it out")
    if turn.content is None and not turn.images:
        raise wrong(f"{path}.content", "is missing")
    _fill(into, role, turn.content or "", turn.images or (), f"{path}.images")


def _fill(
    into: Message, role: str, content: str, images: Sequence[str] = (), path: str = ""
) -> None:
    """A message: the pictures stand before the text, as in Ollama."""
    into.role = role
    for index, image in enumerate(images):
        field = f"{path}[{index}]"
        into.content.add(media=read_image_base64(image, field))
    if content or not images:
        into.content.add(text=content)
    into.is_string = not images
