"""The chat format of Qwen and Qwen-VL, whose checkpoints have it in their code alone."""

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from shared.text.guard import GUARD
from shared.text.reply_cleaning import STRIP

# ChatML with a system message. A turn's text is encoded apart from what is before it, as by Qwen's `make_context`.
# Pictures are numbered anew in each message, each by its name and its two marks.
_CHATML = (
    "{% if messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>{% endif %}"
    "{% for message in messages %}{% if not loop.first or messages[0]['role'] != 'system' %}{{ '\n' }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    + GUARD
    + "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% set pictures = namespace(seen=0) %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{% set pictures.seen = pictures.seen + 1 %}Picture {{ pictures.seen }}: <img></img>\n"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '\n' }}<|im_start|>assistant\n{% endif %}"
)
_MARKS = ("<|im_end|>", "<|im_start|>")


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`. None for a base model, which has no chat format. Raises InvalidRequest for another one."""
    return _CHATML if _has_chatml(checkpoint) else None


def stops(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.stops`: of chat models both marks (Qwen's `get_stop_words_ids`), whose files name the end of a text
    alone."""
    return _MARKS if _has_chatml(checkpoint) else ()


def clean_up(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.clean_up`: Qwen's `decode_tokens`."""
    return (STRIP,) if _has_chatml(checkpoint) else ()


def _has_chatml(checkpoint: Checkpoint) -> bool:
    kind = checkpoint.generation_config.get("chat_format")
    if kind not in (None, "raw", "chatml"):
        raise bad_option(
            checkpoint,
            f"chat_format {kind!r}; there is chatml",
            "generation_config.json",
        )
    return kind == "chatml"
