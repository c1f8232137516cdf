"""DeepSeek-VL2's chat format, which its own code writes."""

from shared.checkpoint.folder import Checkpoint

_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% set text = message['content'] | trim %}"
    "{% if message['role'] == 'system' %}{{ text }}{{ '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}<|Assistant|>: {{ text }}{{ eos_token }}"
    "{% else %}<|User|>: {{ text }}{{ '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)


def chat_template(checkpoint: Checkpoint) -> str:
    """See `Family.template`."""
    return _TEMPLATE
