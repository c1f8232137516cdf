"""Log-probabilities beside the text of an answer's parts, in the form that chats, responses and Ollama's API have."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.api.part_list import Part, PartKind, Step
from services.gateway.following.logprobs import TokenLogprob
from shared.text.text_fold import TokenBytes

# JSON has no infinity; vLLM's clients know this number.
_LOWEST = -9999.0


class TextScores:
    """Sorts the scores of tokens to the parts of text that these tokens give."""

    def __init__(self) -> None:
        # Of tokens whose text has not come yet.
        self._waiting: list[TokenLogprob] = []

    def push(self, scores: Sequence[TokenLogprob], *, is_thought: bool) -> None:
        """Takes those of the next tokens. `is_thought`: of reasoning or its markers, which are in no text."""
        if not is_thought:
            self._waiting += scores

    def take(self, step: Step, part: Part) -> list[TokenLogprob]:
        """Those of the text by which a part grows; none, nor those that wait, where that is no text."""
        is_text = part.kind is PartKind.TEXT
        if step is not Step.GROWS and (is_text or step is Step.ENDS):
            return []
        found, self._waiting = self._waiting, []
        return found if is_text else []


class ScoreEntries:
    """Entries of lists of log-probabilities."""

    def __init__(self, table: TokenBytes, *, skips_special: bool) -> None:
        """`skips_special`: special tokens are not shown, and have no bytes."""
        self._pieces = table.pieces
        self._shown = table.shown_pieces if skips_special else table.pieces

    def listed(self, scores: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """One for each token."""
        return [
            {
                **self._entry(one.token, one.logprob or 0.0, one.data),
                "top_logprobs": [self._entry(token, value) for token, value in one.top],
            }
            for one in scores
        ]

    def _entry(self, token: int, value: float, data: bytes | None = None) -> Mapping[str, Any]:
        if data is None:
            data = piece_of(self._shown, token)
        return {"token": self._spelled(token), "logprob": max(value, _LOWEST), "bytes": [*data]}

    def _spelled(self, token: int) -> str:
        """Parts of characters are written as escapes, so that different tokens have different names."""
        return piece_of(self._pieces, token).decode("utf-8", "backslashreplace")


def piece_of(pieces: Sequence[bytes], token: int) -> bytes:
    """The bytes of a token by its id, of all tokens' bytes; empty for an id without a token."""
    return pieces[token] if 0 <= token < len(pieces) else b""
