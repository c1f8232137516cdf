"""The words that BLIP-2 was asked questions with (Li et al., 2023); its checkpoints have no chat template."""

from shared.checkpoint.folder import Checkpoint

# A picture without a word gets a caption.
_TEMPLATE = (
    "{% set asked = namespace(anything=false) %}{% for message in messages %}{% set text %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endset %}"
    "{% if message['role'] == 'system' %}{{ text }} {% elif text %}{% set asked.anything = true %}"
    "{{ 'Answer: ' if message['role'] == 'assistant' else 'Question: ' }}{{ text }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt and asked.anything %}Answer:{% endif %}"
)


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`."""
    return _TEMPLATE
