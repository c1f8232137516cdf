"""The texts of single tokens, for the log-probabilities of completions, which name tokens by their ids."""

import threading
from collections.abc import Sequence
from pathlib import Path

from shared.checkpoint.gguf.prepared import prepared_folder
from shared.checkpoint.hub import find_in_cache
from shared.settings import DEMO_MODEL, hub_name
from shared.text.text_fold import TokenBytes


class TokenTexts:
    """Of one model. Its tokenizer is read when a text is first needed: for 150,000 tokens that takes 0.3 s."""

    def __init__(self, model: str | Path | None, revision: str = "", mmproj: str = "") -> None:
        self._model = DEMO_MODEL if model is None else Path(model).expanduser()
        self._revision, self._mmproj = revision, mmproj
        self._lock = threading.Lock()
        self._pieces: Sequence[bytes] | None = None

    def load(self) -> None:
        """Reads the tokenizer, once; blocks."""
        with self._lock:
            if self._pieces is None:
                name = hub_name(self._model)
                folder = (
                    find_in_cache(name, self._revision)
                    if name
                    else prepared_folder(self._model, self._mmproj)
                )
                # That of a served model is there and can be read.
                assert folder is not None, f"{name} is being served"
                self._pieces = TokenBytes.from_tokenizer_json(folder / "tokenizer.json").pieces

    def text(self, token: int) -> str | None:
        """A token's text, with a replacement character for parts of characters; None for an id without one."""
        if self._pieces is None or not 0 <= token < len(self._pieces):
            return None
        return self._pieces[token].decode("utf-8", "replace")
