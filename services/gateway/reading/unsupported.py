"""What asks for something that is not offered yet: refused, since an answer that ignores it is wrong."""

from collections.abc import Mapping
from typing import Any

from services.gateway.reading.fields import Fields

# Each with the values that mean "off": they are what many clients send anyway.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "web_search_options": (),
}
_NOT_OFFERED = "asks for something that this server does not offer: leave it out"
NO_TOOLS = "asks for a tool call: tool calling is not supported yet: leave `{}` out"
_TOOLS = {
    name: NO_TOOLS.format(name) for name in ("tools", "tool_choice", "functions", "function_call")
}


def refuse_unsupported(fields: Fields) -> None:
    """Raises InvalidRequest for a field that asks for something that is not offered yet."""
    for name, off in _UNSUPPORTED.items():
        value = fields.raw(name)
        # `is`-like comparison of types: 1 == True, but "n": true is no number.
        if value is None or any(type(value) is type(o) and value == o for o in off):
            continue
        raise fields.wrong(name, _TOOLS.get(name, _NOT_OFFERED), "UNSUPPORTED_PARAMETER")
