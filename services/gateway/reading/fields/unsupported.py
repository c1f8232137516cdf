"""Fields that ask for something that is not offered: refused, since an answer that ignores them is wrong."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.decoding.about import Refused
from services.gateway.decoding.bounds import wrong
from shared.errors import InvalidRequest

_NONE = msgspec.Raw()
# JSON longer than this has none of the values that mean "off".
_LONGEST_OFF = 64


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What is said of a field, and the values that mean "off" beside null: many clients send them anyway."""

    text: str
    off: tuple[Any, ...] = ()


_REFUSALS: Mapping[str, _Refusal] = {
    "modalities": _Refusal(
        'asks for more than text, and answers are text alone: leave it out or send ["text"]',
        (["text"],),
    ),
    "audio": _Refusal("asks for a spoken answer, and answers are text alone: leave it out"),
    "suffix": _Refusal(
        'asks for what goes before a text, and answers only go on behind `prompt`: leave it out or send ""',
        ("",),
    ),
    "prompt_embeds": _Refusal("is not taken: send `prompt` as a text or as token ids"),
    "chat_template": _Refusal(
        "is not taken from requests: leave it out; the server is started with another template by --chat-template"
    ),
    "logits_processors": _Refusal(
        "asks for code that this server does not run: leave it out or send []", ([],)
    ),
    "web_search_options": _Refusal(
        "asks for a search, and this server does not search: leave it out"
    ),
}


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """The fields of `_REFUSALS`, as unread JSON: what they hold is not built. Empty where a body does not have them."""

    modalities: Refused = _NONE
    audio: Refused = _NONE
    suffix: Refused = _NONE
    prompt_embeds: Refused = _NONE
    chat_template: Refused = _NONE
    logits_processors: Refused = _NONE
    web_search_options: Refused = _NONE


def refuse_unsupported(body: UnsupportedFields) -> None:
    """Raises InvalidRequest for the first field that asks for something."""
    for name, refusal in _REFUSALS.items():
        if not is_off(getattr(body, name), *refusal.off):
            raise unsupported(name, refusal.text)


def unsupported(field: str, text: str) -> InvalidRequest:
    """The error about a field that asks for something that is not offered."""
    return wrong(field, text, "UNSUPPORTED_PARAMETER")


def is_off(raw: msgspec.Raw, *off: Any) -> bool:
    """Whether a field is absent, null, or one of the values `off`."""
    given = bytes(raw)
    if not given:
        return True
    if len(given) > _LONGEST_OFF:
        return False
    try:
        value = json.loads(given)
    except ValueError:  # msgspec finds the end of a raw value without decoding its text
        return False
    # Types are compared too: 1 == True, but "n": true is no number.
    return value is None or any(type(value) is type(o) and value == o for o in off)
