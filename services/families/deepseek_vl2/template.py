"""DeepSeek-VL2's chat format: the ids that its processor's `format_messages_v2` writes, which tokenizes each message by
itself. The text that `format_messages` shows beside them has other blanks.
"""

from shared.checkpoint.folder import Checkpoint
from shared.text.guard import GUARD
from shared.text.tokenizer_file import read_tokenizer

_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% set text = message['content'] | trim %}"
    "{% if message['role'] == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('a system message can only be the first one') }}{% endif %}"
    "{{ text }}"
    "{% elif message['role'] == 'assistant' %}{{ guard }}{{ text }}{{ eos_token }}"
    "{% else %}<|User|>: {{ text }}{{ '\n\n' }}"
    "{% if not loop.last or add_generation_prompt %}<|Assistant|>:{% endif %}{% endif %}{% endfor %}"
).replace("{{ guard }}", GUARD)


def chat_template(checkpoint: Checkpoint) -> str:
    """See `Family.template`."""
    return _TEMPLATE


def stops(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.stops`: the tokenizer's end, which the model's `inference.py` passes to `generate` whatever
    `language_config` names."""
    end = read_tokenizer(checkpoint.folder / "tokenizer.json").special_tokens.get("eos_token")
    return () if end is None else (end,)
