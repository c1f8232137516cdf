"""The chat format of Qwen and Qwen-VL, whose checkpoints have it in their code alone."""

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

# ChatML with a system message; pictures are numbered anew in each message, each by its name and its two marks.
_CHATML = (
    "{% if messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>{% endif %}"
    "{% for message in messages %}{% if not loop.first or messages[0]['role'] != 'system' %}{{ '\n' }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% set pictures = namespace(seen=0) %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{% set pictures.seen = pictures.seen + 1 %}Picture {{ pictures.seen }}: <img></img>\n"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '\n' }}<|im_start|>assistant\n{% endif %}"
)


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`. None for a base model, which has no chat format. Raises InvalidRequest for another one."""
    kind = checkpoint.generation_config.get("chat_format")
    if kind not in (None, "raw", "chatml"):
        raise InvalidRequest(
            "UNSUPPORTED_CONFIG",
            f"{checkpoint.folder / 'generation_config.json'}: chat_format {kind!r}; there is chatml",
            field="model",
        )
    return _CHATML if kind == "chatml" else None
