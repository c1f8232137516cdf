"""Text from token ids: a table id -> bytes, and two pure folds over it.

`TextFold` gives the text of each token, `StopFinder` finds complete stop strings.
Both see one token at a time and keep no clock and no I/O, so the text after token k depends on
tokens 0..k alone: any replica that folds the same log writes the same bytes, and a stream is resumed by folding its
beginning again without sending it.

Only the standard library is used here, because the pure core of the scheduler holds a `StopFinder` too.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shared.text.stop_search import StopSearch, StopStrings
from shared.text.token_decoder import UnsupportedTokenizer, read_decoder
from shared.text.token_normalizer import normalized
from shared.text.tokenizer_file import read_tokenizer

__all__ = [
    "ByteStream",
    "StopFinder",
    "StopMatch",
    "TextFold",
    "TokenBytes",
    "UnsupportedTokenizer",
]


class TokenBytes:
    """What each token id adds to the output, in bytes. Immutable; shared by every fold of a model."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        special_ids: Iterable[int] = (),
        *,
        leading_spaces_stripped: int = 0,
        utf8_errors: str = "replace",
    ) -> None:
        """`pieces[id]` is the bytes of a token; ids beyond the end, or without a token, add
        nothing.
        """
        self.pieces = list(pieces)
        self.special_ids = frozenset(special_ids)
        self.leading_spaces_stripped = leading_spaces_stripped
        self.utf8_errors = utf8_errors
        self.shown_pieces = [
            b"" if index in self.special_ids else piece for index, piece in enumerate(self.pieces)
        ]

    @classmethod
    def from_tokenizer_json(cls, path: Path) -> Self:
        """Reads a Hugging Face `tokenizer.json` and the files beside it.

        Raises OSError or ValueError if the file cannot be read, and UnsupportedTokenizer for
        decoders other than ByteLevel and the SentencePiece-like sequence of Replace, ByteFallback,
        Fuse and Strip.
        """
        content = read_tokenizer(path).content
        tokens = _vocabulary(content)
        special = []
        for added in content["added_tokens"]:
            text = added["content"]
            if added["normalized"]:
                text = normalized(content.get("normalizer"), text)
            tokens[added["id"]] = text
            if added["special"]:
                special.append(added["content"])
        # A token is special by its content, as in the `tokenizers` library, whatever its id.
        names = frozenset(special)
        special_ids = [index for index, token in tokens.items() if token in names]
        decoder = read_decoder(content.get("decoder"))
        pieces = [b""] * (max(tokens, default=-1) + 1)
        for index, token in tokens.items():
            pieces[index] = decoder.piece(token)
        return cls(
            pieces,
            special_ids,
            leading_spaces_stripped=decoder.leading_spaces_stripped,
            utf8_errors=decoder.utf8_errors,
        )

    def __len__(self) -> int:
        return len(self.pieces)

    def text(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of a list of ids."""
        fold = TextFold(self, skip_special_tokens)
        return "".join(map(fold.push, token_ids)) + fold.finish()


class ByteStream:
    """Tokens to bytes: drops special tokens where asked, and the leading spaces that SentencePiece
    adds.
    """

    def __init__(self, table: TokenBytes, skip_special_tokens: bool) -> None:
        self._pieces = table.shown_pieces if skip_special_tokens else table.pieces
        self._size = len(self._pieces)
        self._spaces_to_strip = table.leading_spaces_stripped

    def push(self, token_id: int) -> bytes:
        """The bytes that this token adds."""
        piece = self._pieces[token_id] if 0 <= token_id < self._size else b""
        if self._spaces_to_strip and piece:
            stripped = piece.lstrip(b" ")
            spaces = min(len(piece) - len(stripped), self._spaces_to_strip)
            # The first byte that is no space ends the leading run.
            self._spaces_to_strip = 0 if stripped else self._spaces_to_strip - spaces
            return piece[spaces:]
        return piece


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed: which, and how many bytes of output to remove for it."""

    stop: str
    cut_bytes: int


class StopFinder:
    """Finds after each token whether the output now contains a stop string."""

    def __init__(
        self,
        table: TokenBytes,
        stops: StopStrings,
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        """`skip_special_tokens` as in the reply's text; `include_stop` keeps the stop string:
        nothing is cut then.
        """
        self._stream = ByteStream(table, skip_special_tokens)
        self._search = StopSearch(stops)
        self._include_stop = include_stop

    def push(self, token_id: int) -> StopMatch | None:
        """Takes the next token; `cut_bytes` of a match counts from the beginning of the stop string
        to the end.
        """
        _, found = self._search.push(self._stream.push(token_id))
        if found is None:
            return None
        return StopMatch(found, 0 if self._include_stop else len(self._search.held))


class TextFold:
    """The text that each token adds. Holds back half characters and whatever could begin a stop
    string.
    """

    def __init__(
        self,
        table: TokenBytes,
        skip_special_tokens: bool = True,
        stops: StopStrings | None = None,
        include_stop: bool = False,
    ) -> None:
        """With `include_stop` nothing will be cut, so nothing is held back for it."""
        self._stream = ByteStream(table, skip_special_tokens)
        self._search = StopSearch(stops) if stops is not None and not include_stop else None
        self._decode = codecs.getincrementaldecoder("utf-8")(table.utf8_errors).decode

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that is certain now."""
        data = self._stream.push(token_id)
        if self._search is not None:
            data, _ = self._search.push(data)
        return self._decode(data)

    @property
    def held_bytes(self) -> int:
        """Bytes at the end of the output that may still turn out to be a stop string."""
        return len(self._search.held) if self._search else 0

    def finish(self, cut: int = 0) -> str:
        """Returns what was held back, without its last `cut` bytes; incomplete characters are
        replaced.

        Raises ValueError if the cut reaches into text that was given out, which an ending of the
        same log never asks.
        """
        held = self._search.held if self._search else b""
        if cut > len(held):
            raise ValueError(f"cut of {cut} bytes, but only {len(held)} are held back")
        if self._search:
            self._search.held = b""
        return self._decode(held[: len(held) - cut], True)


def _vocabulary(content: dict[str, Any]) -> dict[int, str]:
    model = content.get("model") or {}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        return {index: token for token, index in vocabulary.items()}
    if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of ids
        return {index: entry[0] for index, entry in enumerate(vocabulary)}
    raise UnsupportedTokenizer(f"tokenizer model {model.get('type')!r} has no vocabulary")
