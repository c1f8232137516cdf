"""Two APIs with forms of their own, as a gateway mounts them: `notes` has named events with a ping of its own, `lines`
JSON lines without any. Their keys, errors and statuses differ from those of OpenAI's API too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.gateway.admission.api_keys import BEARER, KeyHeader
from services.gateway.admission.caller import Caller
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.generating import Generating, Reader
from services.gateway.api.parts import Api, Parts
from services.gateway.decoding.decode import decode
from services.gateway.following.answer import Answer, Piece
from services.gateway.following.event_id import FINISH_SENT, OPEN, EventIds
from services.gateway.http.endpoint import MakeWriter, ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from services.gateway.http.streams import write_stream
from services.gateway.reading.generation import read_generation, text_prompt
from services.gateway.reading.media.data_urls import DecodedBody, InlineMedia
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import ServingError
from shared.net import tasks

# Kinds of reply that no gateway without these APIs knows.
NOTE_KIND, LINE_KIND = 1000, 1001
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
OVERLOADED = 529  # where other APIs say 503


class NoteRequest(GenerationOptions, kw_only=True):
    """POST /notes, and POST /lines/write."""

    note: str = ""


class NoteForm:
    """Named events."""

    media_type = b"text/event-stream"
    ping = PING
    after_ping = b""

    def failure(self, error: ServingError) -> bytes:
        """An event of the name `error`."""
        return _event("error", _note_error(error))


class NoteWriter(NoteForm):
    """One answer as named events."""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        self._answer = answer
        self._ids = EventIds(answer.head.request_id, answer.progress)
        self._with_ids = with_ids

    def accepted(self) -> bytes:
        """The event that the request is accepted, unless the client has it."""
        if self._answer.progress.head_events != 0:
            return b""
        name, tokens = f"note_{self._answer.head.request_id}", self._answer.prompt_tokens
        content = {"type": "begin", "name": name, "prompt_tokens": tokens}
        return self._place(self._ids.of_head(1)) + _event("begin", content)

    def first(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def piece(self, piece: Piece) -> bytes:
        """The piece's text, and the end of the choice with it."""
        end = OPEN if piece.ending is None else FINISH_SENT
        self._ids.go_on(piece.choice, piece.count, end)
        if not piece.text and piece.ending is None:
            return b""
        content = {"type": "text", "text": piece.text, "is_last": piece.ending is not None}
        return self._place(self._ids.current()) + _event("text", content)

    def end(self) -> bytes:
        """An event of its own."""
        return _event("end", {"type": "end", "tokens": self._answer.completion_tokens})

    def _place(self, event_id: str) -> bytes:
        return f"id: {event_id}\n".encode() if self._with_ids else b""


class LineWriter:
    """One answer as JSON lines."""

    media_type = b"application/x-ndjson"
    ping = after_ping = b""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        self._ids = EventIds(answer.head.request_id, answer.progress)
        self._with_ids = with_ids

    def accepted(self) -> bytes:
        """Nothing."""
        return b""

    def first(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def piece(self, piece: Piece) -> bytes:
        """A line with the text."""
        self._ids.go_on(piece.choice, piece.count, OPEN if piece.ending is None else FINISH_SENT)
        if not piece.text and piece.ending is None:
            return b""
        return _line({"text": piece.text} | ({"at": self._ids.current()} if self._with_ids else {}))

    def end(self) -> bytes:
        """A line that says so."""
        return _line({"done": True})

    def failure(self, error: ServingError) -> bytes:
        """A line with the error."""
        return _line({"error": error.message})


@dataclass
class NotesEndpoint:
    """POST /notes."""

    routes: Sequence[Route]
    roots = ("/notes",)
    key_headers = (KeyHeader("X-Api-Key"), BEARER)

    def error(self, error: ServingError) -> ErrorReply:
        """As an event has it, with a status of its own for what is overloaded."""
        status = OVERLOADED if error.http_status == 503 else error.http_status
        return ErrorReply(status, _json(_note_error(error)))


@dataclass
class LinesEndpoint:
    """POST /lines/write."""

    routes: Sequence[Route]
    roots = ("/lines",)
    key_headers = (KeyHeader("X-Line-Key"),)

    def error(self, error: ServingError) -> ErrorReply:
        """Its message alone."""
        body = _line({"error": error.message})
        return ErrorReply(error.http_status, body, b"application/x-ndjson")


class _Handler:
    def __init__(self, generating: Generating, kind: int, make_writer: MakeWriter) -> None:
        self._generating = generating
        self._kind = kind
        self._make_writer = make_writer

    async def answer(self, exchange: Exchange, caller: Caller) -> None:
        read: Reader = partial(self._read)
        await self._generating.answer(exchange, caller, read, self._write)

    def _read(self, exchange: Exchange, body: bytes) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = DecodedBody(decode(body, NoteRequest), body, InlineMedia())
        prompt = text_prompt(decoded.content.note)
        kind: Any = self._kind
        request = read_generation(decoded.content, prompt, kind, None, self._generating.model)
        return [request], self._generating.read_options(exchange, decoded)

    async def _write(
        self, exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
    ) -> None:
        if stream:
            writers = [self._make_writer(answer, with_ids) for answer in answers]
            await write_stream(exchange, answers, writers)
            return
        [[outcome]] = await tasks.together(answer.whole() for answer in answers)
        await exchange.respond(200, _json({"text": outcome.text}))


def _notes(parts: Parts) -> NotesEndpoint:
    handler = _Handler(parts.generating, NOTE_KIND, NoteWriter)
    return NotesEndpoint([Route("POST", "/notes", handler.answer, NoteRequest, generates=True)])


def _lines(parts: Parts) -> LinesEndpoint:
    handler = _Handler(parts.generating, LINE_KIND, LineWriter)
    route = Route("POST", "/lines/write", handler.answer, NoteRequest, generates=True)
    return LinesEndpoint([route])


NOTES = Api(_notes, {NOTE_KIND: ReplyForm(NoteWriter, "note_")})
LINES = Api(_lines, {LINE_KIND: ReplyForm(LineWriter)})


def _note_error(error: ServingError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": error.reason.lower(), "message": error.message}}


def _event(name: str, content: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _json(content))


def _line(content: object) -> bytes:
    return _json(content) + b"\n"


def _json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
