"""InternVL's chat formats, which its own code writes whatever the tokenizer's files say (`get_conv_template` and `chat`
of OpenGVLab/InternVL @ 2410d1d).
"""

from dataclasses import asdict, dataclass

from services.families.internvl_chat.conversation_file import system_message
from shared.checkpoint.folder import Checkpoint

_OLDER = "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"  # noqa: RUF001
_NEWER = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"  # noqa: RUF001


@dataclass(frozen=True)
class _Format:
    """`system`: the message of conversations without one. A turn is `opening`, its role, `closing`, its text, `end`."""

    system: str
    opening: str = "<|im_start|>"
    closing: str = "\n"
    end: str = "<|im_end|>"


_TEMPLATE = (
    "{% macro turn(role, text) %}{{ opening ~ role ~ closing ~ text ~ end }}{% endmacro %}"
    "{% if messages[0]['role'] != 'system' %}{{ turn('system', system) }}{% endif %}"
    "{% for message in messages %}{{ turn(message['role'], message['content']) }}{% endfor %}"
    "{% if add_generation_prompt %}{{ opening ~ 'assistant' ~ closing }}{% endif %}"
)
# By `template` of config.json.
_FORMATS = {
    "Hermes-2": _Format(_OLDER),
    "internlm2-chat": _Format(_OLDER),
    "phi3-chat": _Format(_OLDER, "<|", "|>\n", "<|end|>"),
    "internvl2_5": _Format(_NEWER, end="<|im_end|>\n"),
}


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`. The system message is that of config.json, else of the folder's conversation.py, where
    InternVL-Chat-V1.5 has another one than InternVL2 with the same `template`; else of InternVL2 and later ones.
    """
    name = str(checkpoint.config.get("template"))
    found = _FORMATS.get(name)
    if found is None:
        return None
    system = checkpoint.config.get("system_message")
    if system is None:
        system = system_message(checkpoint.folder, name)
    values = {**asdict(found), "system": found.system if system is None else str(system)}
    return "".join(_assignment(*value) for value in values.items()) + _TEMPLATE


def stops(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.stops`: `chat` ends an answer where a turn ends, whatever the files name."""
    found = _FORMATS.get(str(checkpoint.config.get("template")))
    return () if found is None else (found.end.strip(),)


def _assignment(name: str, text: str) -> str:
    written = text.encode("unicode_escape").decode().replace("'", "\\'")
    return f"{{% set {name} = '{written}' %}}"
