"""The chat formats of ChatGLM2 and ChatGLM3, which folders of their first releases have in their code alone."""

from shared.checkpoint.files import read_json
from shared.checkpoint.folder import Checkpoint
from shared.text.reply_cleaning import STRIP, TRAINING_DATE

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
_TURNS = ("<|user|>", "<|observation|>")
_LARGEST_VOCABULARY = 100_000  # of both; GLM-4 has a larger one, and its template in its files


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`."""
    if _is_glm4(checkpoint):
        return None
    return _CHATGLM3 if _is_chatglm3(checkpoint) else _CHATGLM2


def stops(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.stops`: from ChatGLM3 on (`stream_chat`) the turns that another one begins; files of ChatGLM3 name
    the end of a text alone."""
    return _TURNS if _is_glm4(checkpoint) or _is_chatglm3(checkpoint) else ()


def clean_up(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.clean_up`: `process_response` of ChatGLM2 and 3. ChatGLM3's replies begin with an empty line, where
    the name of a tool may stand; a reply with one is left whole. What GLM-4's does is not known."""
    return () if _is_glm4(checkpoint) else (STRIP, TRAINING_DATE)


def _is_glm4(checkpoint: Checkpoint) -> bool:
    own = checkpoint.tokenizer_config.get("tokenizer_class") == "ChatGLM4Tokenizer"
    return own or int(checkpoint.config.get("padded_vocab_size") or 0) > _LARGEST_VOCABULARY


def _is_chatglm3(checkpoint: Checkpoint) -> bool:
    """ChatGLM2 and 3 have one configuration: ChatGLM3's files have its name, or name the tokens of its roles."""
    path = checkpoint.folder / "tokenizer_config.json"
    settings = str(read_json(path)) if path.is_file() else ""
    name = str(checkpoint.config.get("_name_or_path"))
    return "chatglm3" in name or "<|user|>" in settings
