"""WeMM's chat format. One question alone is written without a newline before the answer's mark, as MindIE's port does;
longer conversations by turns of a line each, as the model's own helper writes them."""

from shared.checkpoint.folder import Checkpoint

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "{% if messages|length > 1 %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)


def chat_template(checkpoint: Checkpoint) -> str:
    """See `Family.template`."""
    return _TEMPLATE
