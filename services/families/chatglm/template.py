"""The chat formats of ChatGLM2 and ChatGLM3, which folders of their first releases have in their code alone."""

from shared.checkpoint.folder import Checkpoint
from shared.model_config.files import read_json

# Rounds are numbered from one; the last question ends with the answer's beginning.
_CHATGLM2 = (
    "[gMASK]sop{% set rounds = namespace(seen=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set rounds.seen = rounds.seen + 1 %}"
    "[Round {{ rounds.seen }}]{{ '\n\n' }}问：{{ message['content'] }}{{ '\n\n' }}答："  # noqa: RUF001
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ '\n\n' }}"
    "{% else %}{{ raise_exception('ChatGLM2 has turns of user and assistant alone') }}{% endif %}"
    "{% endfor %}"
)
# A token for each role; what is said stands on the next line.
_CHATGLM3 = (
    "[gMASK]sop{% for message in messages %}<|{{ message['role'] }}|>{{ '\n ' }}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LARGEST_VOCABULARY = 100_000  # of both; GLM-4 has a larger one, and its template in its files


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`. The two have one configuration: ChatGLM3's files have its name, or name the tokens of its
    roles."""
    if int(checkpoint.config.get("padded_vocab_size") or 0) > _LARGEST_VOCABULARY:
        return None
    path = checkpoint.folder / "tokenizer_config.json"
    settings = str(read_json(path)) if path.is_file() else ""
    name = str(checkpoint.config.get("_name_or_path"))
    return _CHATGLM3 if "chatglm3" in name or "<|user|>" in settings else _CHATGLM2
