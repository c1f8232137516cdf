"""Replies of /generate and /generate_stream, and errors as {"error": "text"}."""

from collections.abc import Iterator
from typing import Any

from services.gateway.api.compact_json import compact
from services.gateway.api.kserve.schema import VERSION
from services.gateway.api.server_sent_events import EventStream
from services.gateway.endings import end_name
from services.gateway.following.answer import Answer, Outcome, Piece
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError
from tessera.common.v1.ending_pb2 import Ending


class TextWriter(EventStream):
    """An answer as events with the text that each adds; the end of the last one is that of the stream."""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        super().__init__(answer, with_ids)
        self._answer = answer
        progress = answer.progress
        self._before = answer.head.reply.prompt_text if not progress.counts[0] else ""

    def accepted(self) -> bytes:
        """Nothing."""
        return b""

    def first(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def piece(self, piece: Piece) -> bytes:
        """An event, where the piece has text or ends the answer."""
        place = self.place(piece)
        if not piece.text and piece.ending is None:
            return b""
        text, self._before = self._before + piece.text, ""
        content = generated(self._answer, text, piece.ending, piece.count)
        return place + _event(content)

    def end(self) -> bytes:
        """Nothing."""
        return b""

    def failure(self, error: ServingError) -> bytes:
        """An event with the error."""
        return _event({"error": error.message})


def whole(answer: Answer, outcome: Outcome) -> bytes:
    """The reply that is not streamed."""
    text = answer.head.reply.prompt_text + outcome.text
    return compact(generated(answer, text, outcome.ending, outcome.tokens)).encode()


def generated(answer: Answer, text: str, ending: Ending | None, tokens: int) -> dict[str, Any]:
    """What is said of a text, which may be a part of the answer."""
    reply = answer.head.reply
    content: dict[str, Any] = {"id": reply.client_id} if reply.client_id else {}
    content |= {"model_name": answer.head.model, "model_version": VERSION, "text_output": text}
    if reply.details and ending is not None:
        content["details"] = {"finish_reason": end_name(ending), "generated_tokens": tokens}
    return content


def error_reply(error: ServingError) -> ErrorReply:
    """A whole response."""
    return ErrorReply(error.http_status, compact({"error": error.message}).encode())


def _event(content: Any) -> bytes:
    return f"data: {compact(content)}\n\n".encode()
