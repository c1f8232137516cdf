"""Fields that ask for something that is not offered: refused, since an answer that ignores them is wrong."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.reading.bounds import wrong
from shared.errors import InvalidRequest

_NONE = msgspec.Raw()
# JSON longer than this has none of the values that mean "off".
_LONGEST_OFF = 64

_NO_TOOLS = "asks for a tool call: tool calling is not supported yet: leave `{}` out"
_NOT_OFFERED = "asks for something that this server does not offer: leave it out"
_TOOLS = frozenset({"tools", "tool_choice", "functions", "function_call", "tool_calls"})
# The values that mean "off": they are what many clients send anyway.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "continue_final_message": (False,),
    "documents": ([],),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
}


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """The fields, as unread JSON: what they hold is not built. Empty where a body does not have them."""

    tools: msgspec.Raw = _NONE
    tool_choice: msgspec.Raw = _NONE
    functions: msgspec.Raw = _NONE
    function_call: msgspec.Raw = _NONE
    response_format: msgspec.Raw = _NONE
    structured_outputs: msgspec.Raw = _NONE
    guided_json: msgspec.Raw = _NONE
    guided_regex: msgspec.Raw = _NONE
    guided_choice: msgspec.Raw = _NONE
    guided_grammar: msgspec.Raw = _NONE
    modalities: msgspec.Raw = _NONE
    audio: msgspec.Raw = _NONE
    suffix: msgspec.Raw = _NONE
    prompt_embeds: msgspec.Raw = _NONE
    chat_template: msgspec.Raw = _NONE
    continue_final_message: msgspec.Raw = _NONE
    documents: msgspec.Raw = _NONE
    logits_processors: msgspec.Raw = _NONE
    mm_processor_kwargs: msgspec.Raw = _NONE
    web_search_options: msgspec.Raw = _NONE


def refuse_unsupported(body: UnsupportedFields) -> None:
    """Raises InvalidRequest for the first field that asks for something."""
    for name in UnsupportedFields.__struct_fields__:
        raw: msgspec.Raw = getattr(body, name)
        if raw is not _NONE and not _is_off(bytes(raw), _OFF.get(name, ())):
            raise unsupported(name)


def unsupported(field: str) -> InvalidRequest:
    """The error about a field that asks for something that is not offered."""
    name = field.rpartition(".")[2]
    text = _NO_TOOLS.format(name) if name in _TOOLS else _NOT_OFFERED
    return wrong(field, text, "UNSUPPORTED_PARAMETER")


def _is_off(raw: bytes, off: tuple[Any, ...]) -> bool:
    if len(raw) > _LONGEST_OFF:
        return False
    try:
        value = json.loads(raw)
    except ValueError:  # msgspec finds the end of a raw value without decoding its text
        return False
    # Types are compared too: 1 == True, but "n": true is no number.
    return value is None or any(type(value) is type(o) and value == o for o in off)
