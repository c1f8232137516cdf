"""Log-probabilities beside the text: which tokens a piece of text is made of, and how likely each
was.

A token is reported together with its first byte of text. So a token is held back as long as all its
bytes may belong to a stop string, and one that lies wholly in a removed stop string is never
reported.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from shared.text.text_fold import ByteStream, TokenBytes

# Of records that are read at once.
_SLICE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token: the bytes that it adds to the text, the characters before it, its log-probability
    (None for the first of a prompt), and the most likely tokens in its place, best first.
    """

    token: int
    data: bytes
    offset: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


Scores = tuple[float, list[tuple[int, float]]]


def read_scores(records: bytes, stride: int) -> list[Scores]:
    """The log-probabilities in consecutive log records (`shared/queue/token_log.py`) of `stride` bytes:
    each token's own, and the top ones. Where a vocabulary has too few ids the rest is left out.
    """
    pairs = np.frombuffer(records, np.uint8).reshape(-1, stride)[:, 4:]
    table = np.ascontiguousarray(pairs).view([("id", "<i4"), ("logprob", "<f4")])
    own: list[float] = table["logprob"][:, 0].tolist()
    ids, values = table["id"][:, 1:].tolist(), table["logprob"][:, 1:].tolist()
    return [
        (mine, [(i, value) for i, value in zip(row, row_values, strict=True) if i >= 0])
        for mine, row, row_values in zip(own, ids, values, strict=True)
    ]


class PromptScores:
    """The scores of all tokens of a prompt but the first, as they are stored, and read in slices."""

    def __init__(self, records: bytes, stride: int) -> None:
        self._records = records
        self._stride = stride

    def __iter__(self) -> Iterator[Scores]:
        size = _SLICE_BYTES // self._stride * self._stride or self._stride
        for start in range(0, len(self._records), size):
            yield from read_scores(self._records[start : start + size], self._stride)


class LogprobFold:
    """Tokens and their scores to those whose text has been given out, in step with a `TextFold`."""

    def __init__(self, table: TokenBytes, skip_special_tokens: bool, first_offset: int = 0) -> None:
        """`first_offset` counts the characters before the first token."""
        self._stream = ByteStream(table, skip_special_tokens)
        self._decode = codecs.getincrementaldecoder("utf-8")(table.utf8_errors).decode
        self._offset = first_offset
        self._size = 0
        # (bytes of output up to the token, and with it), the token
        self._held: deque[tuple[int, int, TokenLogprob]] = deque()

    def push(self, token: int, scores: Scores) -> None:
        """Takes the next token."""
        data = self._stream.push(token)
        before, self._size = self._size, self._size + len(data)
        entry = TokenLogprob(token, data, self._offset, *scores)
        self._offset += len(self._decode(data))
        self._held.append((before, self._size, entry))

    def release(self, held_bytes: int) -> list[TokenLogprob]:
        """The tokens that have begun before the last `held_bytes` bytes of the output."""
        sure, held = self._size - held_bytes, self._held
        released = []
        while held and (held[0][0] < sure or held[0][1] <= sure):
            released.append(held.popleft()[2])
        return released


def prompt_entries(
    table: TokenBytes, token_ids: Sequence[int], text: str, scores: Iterable[Scores]
) -> Iterator[TokenLogprob]:
    """Yields the tokens of a prompt, the first without a log-probability. Offsets are places in `text`,
    which may lack the token that the tokenizer put in front.
    """
    stream = ByteStream(table, skip_special_tokens=False)
    decode = codecs.getincrementaldecoder("utf-8")(table.utf8_errors).decode
    offset = 0
    first: tuple[float | None, list[tuple[int, float]]] = (None, [])
    for token, (own, top) in zip(token_ids, chain([first], scores), strict=True):
        data = stream.push(token)
        if top is first[1] and token in table.special_ids and not text.encode().startswith(data):
            data = b""
            stream = ByteStream(table, skip_special_tokens=False)
        yield TokenLogprob(token, data, offset, own, top)
        offset += len(decode(data))
