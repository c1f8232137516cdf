"""Molmo's chat format: the first token, all pictures, and the turns, each behind a blank."""

from shared.checkpoint.folder import Checkpoint

_TEMPLATE = (
    "<|endoftext|>"
    "{% for message in messages %}{% if message['content'] is not string %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<im_start>{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] != ('user' if loop.index % 2 else 'assistant') %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    " {{ message['role'].capitalize() }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} Assistant:{% endif %}"
)


def chat_template(checkpoint: Checkpoint) -> str:
    """See `Family.template`. The files' own leaves the first token and the pictures to the model's processor."""
    return _TEMPLATE
