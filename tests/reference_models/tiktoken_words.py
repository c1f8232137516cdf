"""Qwen's `qwen.tiktoken`: a tiny file, and byte pair encoding by its ranks.

Assumption: the special tokens follow the ranks, as many as in the released vocabulary: 151643 is the
first there, 151936 the size of the vocabulary.
"""

import base64
import unicodedata
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from tests.support.tokenizers import SENTENCES

NAME = "qwen.tiktoken"
SPECIAL_COUNT = 151936 - 151643
# Places after the ranks.
END_OF_TEXT, START, END, IMAGE_START = 0, 1, 2, 151857 - 151643
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_ranks(folder: Path) -> int:
    """Writes single bytes, line breaks and pairs of pieces from some sentences; returns the number of ranks."""
    pieces = [bytes([value]) for value in range(256)] + [b"\n\n", b"\n\n\n"]
    for sentence in SENTENCES[:4]:
        for word in split(sentence):
            pieces += [word[:size] for size in range(2, len(word) + 1)]
    unique = list(dict.fromkeys(pieces))
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(unique)]
    (folder / NAME).write_text("".join(lines))
    return len(unique)


def split(text: str) -> list[bytes]:
    """The words of a text in Unicode's NFC, as UTF-8."""
    normal = unicodedata.normalize("NFC", text)
    words = Split(Regex(PATTERN), "isolated").pre_tokenize_str(normal)
    return [word.encode() for word, _ in words]


class TiktokenWords:
    """Ranks by piece. Text is ordinary: it holds no special tokens."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / NAME).read_text().splitlines()
        pairs = [line.split() for line in lines]
        self.ranks = {base64.b64decode(piece): int(rank) for piece, rank in pairs}

    def special(self, place: int) -> int:
        """The id of a special token by its place after the ranks."""
        return len(self.ranks) + place

    def encode(self, text: str) -> list[int]:
        """Ids of an ordinary text."""
        return [rank for word in split(text) for rank in self._word(word)]

    def _word(self, word: bytes) -> list[int]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while True:
            ranks = [self.ranks.get(a + b) for a, b in pairwise(parts)]
            known = [rank for rank in ranks if rank is not None]
            if not known:
                return [self.ranks[part] for part in parts]
            first = ranks.index(min(known))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
