"""Chameleon's conversations: the tokenizer's separator ends every turn."""

from functools import cache
from pathlib import Path

import numpy as np

from services.preprocess.prompt.tokenizer import Ids
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from shared.text.tokenizer_file import read_tokenizer

# `finish` writes the last separator.
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% if not loop.last %}{{ sep_token }}{% endif %}{% endfor %}"
)


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`."""
    return _TEMPLATE


def finish(ids: Ids, checkpoint: Checkpoint) -> Ids:
    """With the separator at the end, as the processor of transformers writes it."""
    return np.concatenate([ids, np.array([_separator(checkpoint.folder)], np.int32)])


@cache
def _separator(folder: Path) -> int:
    """Raises InvalidRequest for a tokenizer without one."""
    found = read_tokenizer(folder / "tokenizer.json").special_id("sep_token")
    if found is None:
        raise unsupported(Checkpoint(folder), "its tokenizer has no sep_token")
    return found
