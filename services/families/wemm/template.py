"""WeMM's chat format. One question alone is written without a newline before the answer's mark, as MindIE's port does;
longer conversations by turns of a line each, as the model's own helper writes them. A picture stands on a line before
its turn's text, wherever the client has put it."""

from shared.checkpoint.folder import Checkpoint

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{{ '\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
    "{% if messages|length > 1 %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)


def chat_template(checkpoint: Checkpoint) -> str:
    """See `Family.template`."""
    return _TEMPLATE


def stops(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.stops`: the end of a turn, whatever the files name (MindIE-LLM's port stops at its id, 92542)."""
    return ("<|im_end|>",)
