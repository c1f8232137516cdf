"""Molmo2's prompts begin with the tokenizer's first token, or with its last one where it has no first."""

from functools import cache
from pathlib import Path

import numpy as np

from services.preprocess.prompt.tokenizer import Ids
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from shared.text.tokenizer_file import read_tokenizer


def finish(ids: Ids, checkpoint: Checkpoint) -> Ids:
    """With that token at the front, unless it is there, as the processor of transformers writes it."""
    first = _first(checkpoint.folder)
    return ids if ids[0] == first else np.concatenate([np.array([first], np.int32), ids])


@cache
def _first(folder: Path) -> int:
    """Raises InvalidRequest for a tokenizer with neither."""
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    found = (tokenizer.special_id(name) for name in ("bos_token", "eos_token"))
    first = next((token for token in found if token is not None), None)
    if first is None:
        raise unsupported(Checkpoint(folder), "its tokenizer has no bos_token and no eos_token")
    return first
