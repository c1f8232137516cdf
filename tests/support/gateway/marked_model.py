"""A model that writes reasoning and calls of tools between markers, as Qwen3 does."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.support.gateway.stage import StagedModel, write_model
from tests.support.tokenizers import byte_level_tokenizer

# Two calls behind a thought and some text, as such a model writes them.
WEATHER = '{"city": "Łódź", "days": [1, {"a": "</b>"}]}'
FIRST = f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "stop"}\n</tool_call>'
THOUGHT = "The user wants 天气."
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nOne moment. \n{FIRST}\n{SECOND}"

# As in Qwen3's, that special tokens and markers are tokens of their own; one marker is special, as others have them.
_MARKERS = (("<think>", False), ("</think>", False), ("<tool_call>", True), ("</tool_call>", False))
_TEMPLATE = (
    "{% if tools %}tools <tool_call>{% endif %}{% for m in messages %}{{ m['content'] }}"
    "{% endfor %}</think>"
)


def marked_tokenizer() -> Tokenizer:
    """One in which the markers are tokens of their own."""
    made = byte_level_tokenizer()
    for marker, special in _MARKERS:
        made.add_tokens([AddedToken(marker, special=special, normalized=False)])
    return made


def write_marked_model(folder: Path, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder without tensors, whose chat template shows the markers."""
    write_model(folder, tokenizer)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


MARKED = StagedModel(marked_tokenizer, write_marked_model, ANSWER)
