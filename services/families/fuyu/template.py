"""Fuyu's prompts are bare words, each message ended by a line break; its checkpoints have no chat template."""

from shared.checkpoint.folder import Checkpoint

_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
)


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`."""
    return _TEMPLATE


def stops(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.stops`: outputs end with it, while configurations name Persimmon's default, `</s>`."""
    return ("|ENDOFTEXT|",)
