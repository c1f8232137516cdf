"""Prompts and conversations as bodies of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.launcher.offline.lora_request import LoRARequest
from services.launcher.offline.prompts.media import media_url

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_MEDIA = ("image", "video")
_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")
# A PIL image in a part, as vLLM has it.
_PIL = "image_pil"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Where a prompt is sent, the fields that it is sent as, its text where it is one, and the adapter it names."""

    path: str
    body: Mapping[str, Any] = field(repr=False)
    text: str | None = None
    adapter: LoRARequest | None = None


def read_prompt(value: Any) -> Prompt:
    """A text, a list of token ids, or a mapping of `prompt` or `prompt_token_ids` and perhaps `multi_modal_data`.
    Raises ValueError or TypeError.
    """
    if isinstance(value, str):
        return Prompt(COMPLETIONS, {"prompt": value}, value)
    if is_ids(value):
        return _of_ids(value)
    if not isinstance(value, Mapping):
        raise TypeError(
            f"a prompt must be a text, a list of token ids or a dict, not {type(value).__name__}"
        )
    if unknown := [key for key in value if key not in _KEYS]:
        raise ValueError(f"a prompt has no {unknown[0]!r}: it may have {', '.join(_KEYS)}")
    text, ids, media = (value.get(key) for key in _KEYS)
    if (text is None) == (ids is None):
        raise ValueError("a prompt must have either prompt or prompt_token_ids")
    if ids is not None:
        if media:
            raise ValueError("multi_modal_data is for a prompt that is a text")
        return _of_ids(ids)
    if not isinstance(text, str):
        raise TypeError(f"prompt must be a text, not {type(text).__name__}")
    return Prompt(COMPLETIONS, {"prompt": text, **_media(media or {})}, text)


def read_conversation(messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
    """Messages in OpenAI's form, whose parts may also be `{"image": ...}` and `{"text": ...}`; `options`: other fields
    of a chat, None where not given.
    """
    body = {name: value for name, value in options.items() if value is not None}
    return Prompt(CHAT, {"messages": [_message(message) for message in messages], **body})


def is_ids(value: Any) -> bool:
    """Whether it is a list of token ids."""
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return is_list and bool(value) and all(isinstance(one, int) for one in value)


def _of_ids(ids: Any) -> Prompt:
    if not is_ids(ids):
        raise ValueError("prompt_token_ids must be a list of at least one token id")
    return Prompt(COMPLETIONS, {"prompt": list(ids)})


def _media(given: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := [kind for kind in given if kind not in _MEDIA]:
        raise ValueError(f"multi_modal_data.{unknown[0]} is not taken: it may have image, video")
    found = {kind: _listed(kind, given[kind]) for kind in _MEDIA if given.get(kind) is not None}
    return {"multi_modal_data": found} if found else {}


def _listed(kind: str, given: Any) -> list[str]:
    """One item or several; a list of frames is one video only inside a list."""
    values = given if isinstance(given, (list, tuple)) else [given]
    return [media_url(value) for value in values]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return {**message, "content": [_part(part) for part in content]}
    return dict(message)


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise TypeError(f"a part of a message must be a dict or a text, not {type(part).__name__}")
    if part.get(_PIL) is not None:
        return {"type": "image", "image": media_url(part[_PIL])}
    media = {kind: media_url(part[kind]) for kind in _MEDIA if part.get(kind) is not None}
    return {**part, **media}
