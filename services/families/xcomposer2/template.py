"""XComposer2's chat format, ChatML with the names that the tokenizer has for its marks."""

from shared.checkpoint.folder import Checkpoint
from shared.text.tokenizer_file import read_tokenizer

_CHATML = (
    "{%% for message in messages %%}%(start)s{{ message['role'] }}\n"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}<ImageHere>"
    "{%% elif part['type'] == 'text' %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "%(end)s\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}%(start)sassistant{{ '\n' }}{%% endif %%}"
)
_OLD = {"start": "[UNUSED_TOKEN_146]", "end": "[UNUSED_TOKEN_145]"}
_NEW = {"start": "<|im_start|>", "end": "<|im_end|>"}


def chat_template(checkpoint: Checkpoint) -> str:
    """See `Family.template`."""
    added = read_tokenizer(checkpoint.folder / "tokenizer.json").content["added_tokens"]
    known = {token["content"] for token in added}
    return _CHATML % (_NEW if _NEW["start"] in known else _OLD)
