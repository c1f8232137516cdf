"""Log-probabilities as chat and completions have them, and vLLM's `prompt_logprobs`, as JSON that is made piece by
piece: an answer may have millions of them.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring

from services.gateway.api.token_scores import piece_of
from services.gateway.following.logprobs import Scores, TokenLogprob
from shared.text.text_fold import TokenBytes

# JSON has no infinity; vLLM's clients know this number.
_LOWEST = -9999.0
# Strings of one piece.
_JOINED = 1024


class LogprobsWriter:
    """Entries to the values of `logprobs` and `prompt_logprobs`. Keeps what it has spelled."""

    def __init__(
        self, table: TokenBytes, *, is_chat: bool, by_id: bool, skip_special_tokens: bool
    ) -> None:
        """`by_id` names tokens "token_id:17"; special tokens that are not shown have no bytes."""
        self._pieces = table.pieces
        self._shown = table.shown_pieces if skip_special_tokens else table.pieces
        self._is_chat = is_chat
        self._by_id = by_id
        self._names: dict[int, str] = {}
        self._bytes: dict[int, str] = {}
        self._decoded: dict[int, str] = {}

    def value(self, entries: Iterable[TokenLogprob]) -> Iterator[str]:
        """The value of `logprobs` for some tokens; null for no token."""
        return self._chat(entries) if self._is_chat else self._completion(entries)

    def prompt(self, token_ids: Sequence[int], scores: Iterable[Scores], k: int) -> Iterator[str]:
        """vLLM's `prompt_logprobs`: null for the first token, then by token id the token's own and
        the `k` top ones. `rank` is null where the token is not among the top ones.
        """
        yield "[null"
        for token, (own, top) in zip(token_ids[1:], scores, strict=True):
            ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
            entry = {token: self._prompt_entry(token, own, ranks.get(token))}
            for other, value in top[:k]:
                entry[other] = self._prompt_entry(other, value, ranks[other])
            yield f",{{{','.join(entry.values())}}}"
        yield "]"

    def _chat(self, entries: Iterable[TokenLogprob]) -> Iterator[str]:
        before = '{"content":['
        for entry in entries:
            top = ",".join([self._top_entry(token, value) for token, value in entry.top])
            yield (
                f'{before}{{"token":{self._name(entry.token)},"logprob":{_number(entry.logprob)},'
                f'"bytes":{_byte_list(entry.data)},"top_logprobs":[{top}]}}'
            )
            before = ","
        yield '],"refusal":null}' if before == "," else "null"

    def _completion(self, entries: Iterable[TokenLogprob]) -> Iterator[str]:
        tokens: list[str] = []
        values: list[str] = []
        offsets: list[str] = []
        before = '{"top_logprobs":['
        for entry in entries:
            yield f"{before}{self._top(entry)}"
            before = ","
            tokens.append(self._name(entry.token))
            values.append(_number(entry.logprob))
            offsets.append(str(entry.offset))
        if not tokens:
            yield "null"
            return
        yield "]"
        for name, items in (
            ("tokens", tokens),
            ("token_logprobs", values),
            ("text_offset", offsets),
        ):
            yield f',"{name}":['
            yield from joined(items)
            yield "]"
        yield "}"

    def _top_entry(self, token: int, value: float) -> str:
        spelled = self._bytes.get(token)
        if spelled is None:
            spelled = self._bytes[token] = _byte_list(piece_of(self._shown, token))
        return f'{{"token":{self._name(token)},"logprob":{_number(value)},"bytes":{spelled}}}'

    def _top(self, entry: TokenLogprob) -> str:
        if entry.logprob is None:
            return "null"
        # As OpenAI has it: the top ones, and the token itself if it is not among them.
        values = {self._name(token): value for token, value in entry.top}
        values.setdefault(self._name(entry.token), entry.logprob)
        return f"{{{','.join([f'{name}:{_number(value)}' for name, value in values.items()])}}}"

    def _prompt_entry(self, token: int, value: float, rank: int | None) -> str:
        spelled = self._decoded.get(token)
        if spelled is None:
            text = piece_of(self._pieces, token).decode("utf-8", "replace")
            spelled = self._decoded[token] = encode_basestring(text)
        place = "null" if rank is None else rank
        return f'"{token}":{{"logprob":{_number(value)},"rank":{place},"decoded_token":{spelled}}}'

    def _name(self, token: int) -> str:
        """Its name as JSON."""
        name = self._names.get(token)
        if name is None:
            text = f"token_id:{token}" if self._by_id else self._spelled(token)
            name = self._names[token] = encode_basestring(text)
        return name

    def _spelled(self, token: int) -> str:
        """A token's text. Parts of characters are written as OpenAI writes them, so that different
        tokens have different names.
        """
        piece = piece_of(self._pieces, token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            escaped = piece.decode("utf-8", "backslashreplace")
            return escaped if self._is_chat else f"bytes:{escaped}"


def joined(items: Sequence[str]) -> Iterator[str]:
    """Items of a JSON list, in pieces."""
    for start in range(0, len(items), _JOINED):
        yield f"{',' if start else ''}{','.join(items[start : start + _JOINED])}"


def _byte_list(data: bytes) -> str:
    return json.dumps(list(data), separators=(",", ":"))


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "null"
    return repr(max(value, _LOWEST))
