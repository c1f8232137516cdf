"""Log-probabilities as chat and completions have them, and vLLM's `prompt_logprobs`."""

import math
from collections.abc import Sequence
from typing import Any

from services.gateway.following.logprobs import Scores, TokenLogprob
from shared.text.text_fold import TokenBytes

# JSON has no infinity; vLLM's clients know this number.
_LOWEST = -9999.0


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

    def value(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The value of `logprobs` for some tokens; None for no token."""
        if not entries:
            return None
        if self._is_chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [_number(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def prompt(self, token_ids: Sequence[int], scores: Sequence[Scores], k: int) -> list[Any]:
        """vLLM's `prompt_logprobs`: None for the first token, then by token id the token's own and
        the `k` top ones. `rank` is None where the token is not among the top ones.
        """
        entries: list[Any] = [None]
        for token, (own, top) in zip(token_ids[1:], scores, strict=True):
            ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
            entry = {str(token): self._prompt_entry(token, own, ranks.get(token))}
            for other, value in top[:k]:
                entry[str(other)] = self._prompt_entry(other, value, ranks[other])
            entries.append(entry)
        return entries

    def _chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        return {
            "token": self._name(entry.token),
            "logprob": _number(entry.logprob),
            "bytes": list(entry.data),
            "top_logprobs": [
                {
                    "token": self._name(token),
                    "logprob": _number(value),
                    "bytes": list(_piece(self._shown, token)),
                }
                for token, value in entry.top
            ],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float | None] | None:
        if entry.logprob is None:
            return None
        # As OpenAI has it: the top ones, and the token itself if it is not among them.
        values = {self._name(token): _number(value) for token, value in entry.top}
        values.setdefault(self._name(entry.token), _number(entry.logprob))
        return values

    def _prompt_entry(self, token: int, value: float, rank: int | None) -> dict[str, Any]:
        spelled = _piece(self._pieces, token).decode("utf-8", "replace")
        return {"logprob": _number(value), "rank": rank, "decoded_token": spelled}

    def _name(self, token: int) -> str:
        name = self._names.get(token)
        if name is None:
            name = f"token_id:{token}" if self._by_id else self._spelled(token)
            self._names[token] = name
        return name

    def _spelled(self, token: int) -> str:
        """A token's text. Parts of characters are written as OpenAI writes them, so that different
        tokens have different names.
        """
        piece = _piece(self._pieces, token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            escaped = piece.decode("utf-8", "backslashreplace")
            return escaped if self._is_chat else f"bytes:{escaped}"


def _piece(pieces: Sequence[bytes], token: int) -> bytes:
    return pieces[token] if 0 <= token < len(pieces) else b""


def _number(value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    return max(value, _LOWEST)
