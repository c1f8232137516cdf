"""Llama 3.2 Vision's prompts have the tokenizer's first token somewhere: if not, it comes behind leading pictures."""

from functools import cache
from pathlib import Path

import numpy as np

from services.preprocess.prompt.tokenizer import Ids
from shared.checkpoint.folder import Checkpoint
from shared.text.tokenizer_file import read_tokenizer

_IMAGE = 128_256  # of `MllamaConfig`


def finish(ids: Ids, checkpoint: Checkpoint) -> Ids:
    """With that token, as the processor of transformers writes it."""
    first = _first(checkpoint.folder)
    if first is None or (ids == first).any():
        return ids
    text = np.flatnonzero(ids != int(checkpoint.config.get("image_token_index", _IMAGE)))
    place = int(text[0]) if len(text) else len(ids)
    return np.insert(ids, place, first)


@cache
def _first(folder: Path) -> int | None:
    return read_tokenizer(folder / "tokenizer.json").special_id("bos_token")
