"""Small tokenizers with special tokens at chosen ids."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing

from tests.support.tokenizers import byte_level_tokenizer, sentencepiece_like_tokenizer


def sentencepiece_words(special: Mapping[str, int]) -> Tokenizer:
    """Llama-2 style, `<s>` (id 1) before each encoded text, with more special tokens."""
    tokenizer = with_special(sentencepiece_like_tokenizer(), special)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def byte_level_words(special: Mapping[str, int]) -> Tokenizer:
    """GPT-2 style, nothing before a text, with more special tokens."""
    return with_special(byte_level_tokenizer(), special)


def blank_keeping_words(special: Mapping[str, int], plain: Mapping[str, int]) -> Tokenizer:
    """Llama-2 style, one blank before a whole text alone, with tokens `plain` that decoding keeps."""
    tokenizer = with_special(sentencepiece_like_tokenizer(), special, plain)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def with_special(
    tokenizer: Tokenizer, special: Mapping[str, int], plain: Mapping[str, int] | None = None
) -> Tokenizer:
    """The tokenizer with these special and plain tokens; those of the same name lose their old id."""
    added = {**special, **(plain or {})}
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in added]
    content["model"]["vocab"] |= added
    made: Tokenizer = Tokenizer.from_str(json.dumps(content))
    made.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, normalized=False) for token in plain or {}])
    return made


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json."""
    made: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return made


def encode(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    """Ids of a text; `special`: with what the tokenizer puts around a whole text."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids
