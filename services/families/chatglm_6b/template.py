"""ChatGLM-6B's chat format, which its checkpoint has in its code alone."""

from shared.checkpoint.folder import Checkpoint
from shared.text.reply_cleaning import STRIP, TRAINING_DATE, WIDE_PUNCTUATION

# A first question stands as it is, later ones behind all rounds before; then the mask, and the answer's beginning.
_TEMPLATE = (
    "{% set rounds = namespace(seen=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' and messages | length == 1 %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}[Round {{ rounds.seen }}]{{ '\n' }}问：{{ message['content'] }}{{ '\n' }}答："  # noqa: RUF001
    "{% elif message['role'] == 'assistant' %}{% set rounds.seen = rounds.seen + 1 %}"
    "{{ message['content'] }}{{ '\n' }}"
    "{% else %}{{ raise_exception('ChatGLM-6B has turns of user and assistant alone') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[gMASK]<sop>{% endif %}"
)


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`."""
    return _TEMPLATE


def clean_up(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.clean_up`: ChatGLM-6B's `process_response`."""
    return (STRIP, TRAINING_DATE, WIDE_PUNCTUATION)
