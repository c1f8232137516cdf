"""Replies of /infer, and errors as MindIE has them, {"error", "error_type"}."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.gateway.api.compact_json import compact
from services.gateway.api.server_sent_events import EventStream
from services.gateway.endings import end_name
from services.gateway.following.answer import Answer, Outcome, Piece
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError
from tessera.common.v1.ending_pb2 import Ending

_TYPES: Mapping[int, str] = {
    400: "Bad Request",
    401: "Unauthorized",
    404: "NotFoundError",
    422: "Input Validation Error",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}


class InferWriter(EventStream):
    """An answer as events with the tokens and the text that each adds; the last one has the whole text."""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        super().__init__(answer, with_ids)
        self._answer = answer

    def accepted(self) -> bytes:
        """Nothing."""
        return b""

    def first(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def piece(self, piece: Piece) -> bytes:
        """Its event. Times, which are not the same for whoever goes on with a stream, are null."""
        token = {"id": piece.token_ids, "text": piece.text}
        content: dict[str, Any] = {"prefill_time": None, "decode_time": None, "token": token}
        if piece.ending is not None:
            content |= _ended(self._answer, self._answer.text(0), piece.ending, piece.count)
        return self.place(piece) + b"data: %s\n\n" % _json(content)

    def end(self) -> bytes:
        """Nothing."""
        return b""

    def failure(self, error: ServingError) -> bytes:
        """An event with the error."""
        return b"data: %s\n\n" % _json(_error(error))


def whole(answer: Answer, outcome: Outcome) -> bytes:
    """The reply that is not streamed."""
    return _json(_ended(answer, outcome.text, outcome.ending, outcome.tokens))


def error_reply(error: ServingError) -> ErrorReply:
    """A whole response."""
    return ErrorReply(error.http_status, _json(_error(error)))


def _ended(answer: Answer, text: str, ending: Ending, tokens: int) -> dict[str, Any]:
    content: dict[str, Any] = {"generated_text": text}
    if answer.head.reply.details:
        content["details"] = {
            "finish_reason": end_name(ending),
            "generated_tokens": tokens,
            "seed": answer.head.sampling.seed,
        }
    return content


def _error(error: ServingError) -> dict[str, str]:
    status = error.http_status
    kind = _TYPES.get(status, _TYPES[400] if status < 500 else _TYPES[500])
    return {"error": error.message, "error_type": kind}


def _json(content: Any) -> bytes:
    return compact(content).encode()
