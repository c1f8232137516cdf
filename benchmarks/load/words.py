"""Prompts of words, for servers that take no token ids and for conversations."""

import random
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.load.errors import BenchError
from shared.text.tokenizer_file import read_tokenizer

# English, about one token each in common vocabularies.
COMMON_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an "
    "they which one you were all her she there would their we him been has when who will no more if out so "
    "up said what its about than into them can only other time new some could these two may first then do "
    "any like my now over such our man me even most made after also did many off before must well back "
    "through years much where your way down should because long each just state those people too"
)


class WordPrompts:
    """Draws text of a number of tokens: exactly with a tokenizer, about one token a word without."""

    def __init__(self, tokenizer: Path | None) -> None:
        """`tokenizer` is a checkpoint folder or a tokenizer.json. Raises BenchError if it cannot be read."""
        self._tokenizer = _load(tokenizer) if tokenizer is not None else None
        self._words = COMMON_WORDS.split()
        if self._tokenizer is not None:
            one_token = [w for w in self._words if self._count(f" {w} {w}") == 2]
            self._words = one_token or self._words

    def draw(self, source: random.Random, count: int) -> str:
        """Text that is `count` tokens long by the tokenizer, special tokens around it not counted."""
        words = source.choices(self._words, k=count)
        if self._tokenizer is None or count == 0:
            return " ".join(words)
        # A word may be several tokens: as many words as fit, found by bisection.
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            if self._count(" ".join(words[:middle])) <= count:
                low = middle
            else:
                high = middle - 1
        text = " ".join(words[:low])
        while (missing := count - self._count(text)) > 0:
            longer = text + " ." * missing
            if self._count(longer) > count:
                longer = text + "." * missing
            if self._count(longer) > count:
                break
            text = longer
        return text

    def _count(self, text: str) -> int:
        assert self._tokenizer is not None
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _load(path: Path) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_str(read_tokenizer(file).text)
    except Exception as error:  # the library raises nothing narrower
        raise BenchError(f"cannot read {file}: {error}") from None
