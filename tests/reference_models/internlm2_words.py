"""InternLM2's tokenizer as it is released, and a second reading of it.

tokenizer.model (read, InternLM-XComposer2.5's copy): byte pair encoding, bytes for what is not known, no blank before a
text, blanks as they are; 0 <unk>, 1 <s>, 2 </s>; its last 147 pieces are the user's, [UNUSED_TOKEN_0] to
[UNUSED_TOKEN_146]. added_tokens_decoder (quoted; ids read in InternLM's chat_format.md) names the last six of them:
those of the released 92,544 are 92538 <|plugin|> to 92543 <|im_start|>. There is no tokenizer.json.

Assumption: a text is cut at the names of special tokens, and what lies between is encoded apart.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from tests.support.tokenizers import SENTENCES, trained_sentencepiece

UNUSED = 147
_MODEL: Any = sentencepiece_model_pb2  # its classes are made when it is imported
# Behind the last piece, counted from the end of the vocabulary.
MARKS = {
    "<|plugin|>": -6,
    "<|interpreter|>": -5,
    "<|action_end|>": -4,
    "<|action_start|>": -3,
    "<|im_end|>": -2,
    "<|im_start|>": -1,
}
END, START = "<|im_end|>", "<|im_start|>"
OLD_END, OLD_START = "[UNUSED_TOKEN_145]", "[UNUSED_TOKEN_146]"
TRAINED: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 420,
    "byte_fallback": True,
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
}


def write_words(folder: Path, **config: Any) -> int:
    """Writes tokenizer.model, and tokenizer_config.json with `config`; returns the number of pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.model"
    trained_sentencepiece(path, SENTENCES * 20, **TRAINED)
    model = _MODEL.ModelProto.FromString(path.read_bytes())
    for number in range(UNUSED):
        kind = _MODEL.ModelProto.SentencePiece.USER_DEFINED
        model.pieces.add(piece=f"[UNUSED_TOKEN_{number}]", score=0.0, type=kind)
    path.write_bytes(model.SerializeToString())
    settings: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
        "tokenizer_class": "InternLM2Tokenizer",
        "decode_with_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return len(model.pieces)


def listed(size: int, more: Mapping[str, int] | None = None) -> dict[str, Any]:
    """`added_tokens_decoder` for a vocabulary of `size` pieces; `more` texts by their ids."""
    names = {"<unk>": 0, "<s>": 1, "</s>": 2}
    names |= {text: size + place for text, place in MARKS.items()} | dict(more or {})
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {str(i): {"content": text, **flags, "special": True} for text, i in names.items()}


def add_marks(folder: Path, more: Mapping[str, int] | None = None) -> None:
    """Names the control tokens in tokenizer_config.json, as the chat models' has them."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    size = len(sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")))
    path.write_text(json.dumps(config | {"added_tokens_decoder": listed(size, more)}))


class InternLM2Words:
    """Ids and texts by SentencePiece's own library."""

    def __init__(self, folder: Path) -> None:
        self._model = sentencepiece.SentencePieceProcessor(
            model_file=str(folder / "tokenizer.model")
        )
        config = json.loads((folder / "tokenizer_config.json").read_text())
        entries = config.get("added_tokens_decoder", {}).items()
        self.marks = {token["content"]: int(index) for index, token in entries}

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text; `special`: behind the token that begins a text."""
        ids = [1] if special else []
        for part in re.split(f"({'|'.join(map(re.escape, self.marks)) or '(?!)'})", text):
            ids += [self.marks[part]] if part in self.marks else self._model.encode(part)
        return ids
