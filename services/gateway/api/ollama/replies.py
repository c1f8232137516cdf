"""Ollama's replies: lines of JSON, or one object. A line is a pure fold over the log, but for the durations."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from json.encoder import encode_basestring

from services.gateway.api.compact_json import compact
from services.gateway.api.ollama.errors import error_body
from services.gateway.api.token_scores import ScoreEntries
from services.gateway.endings import FINISH_NAMES
from services.gateway.following.answer import Answer, Piece
from services.gateway.following.event_id import FINISH_SENT, OPEN, TEXT_SENT, EventIds
from shared.errors import ServingError
from tessera.common.v1.ending_pb2 import Ending
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_NS = 1_000_000_000
CHATS = frozenset({ReplyKind.REPLY_KIND_OLLAMA_CHAT, ReplyKind.REPLY_KIND_OLLAMA_CHAT_MESSAGE})


class LineWriter:
    """The stream of an answer: a line for each piece of text, and one for the end. With ids a line has `event_id`."""

    media_type = b"application/x-ndjson"
    ping = after_ping = b""  # clients read every line as JSON

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        self._answer = answer
        self._is_chat = answer.head.reply.kind in CHATS
        self._ids = EventIds(answer.head.request_id, answer.progress) if with_ids else None
        self._entries = entries_of(answer)
        self._begin = envelope(answer.head.model, answer.head.created_unix_s)

    def accepted(self) -> bytes:
        """Nothing."""
        return b""

    def first(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def piece(self, piece: Piece) -> bytes:
        """A line with the text, if there is any, and the last line behind the last text."""
        lines, fields = "", self.said(piece)
        if fields or piece.logprobs:
            sent = OPEN if piece.ending is None else TEXT_SENT
            scores = self._entries.listed(piece.logprobs)
            rest = f',"logprobs":{compact(scores)},"done":false' if scores else ',"done":false'
            lines = self._line(piece, sent, fields or said("", self._is_chat), rest)
        elif self._ids is not None:
            self._ids.go_on(piece.choice, piece.count)
        if piece.ending is not None:
            last = last_fields(self._answer, piece.count, piece.ending)
            lines += self._line(piece, FINISH_SENT, said("", self._is_chat), last)
        return lines.encode()

    def said(self, piece: Piece) -> str:
        """The fields with what a piece says; empty where it says nothing."""
        return said(piece.text, self._is_chat) if piece.text else ""

    def end(self) -> bytes:
        """Nothing: the last line came with the last piece."""
        return b""

    def failure(self, error: ServingError) -> bytes:
        """A line with the error; no line says `done` then."""
        return error_body(error) + b"\n"

    def _line(self, piece: Piece, sent: str, fields: str, rest: str) -> str:
        place = ""
        if self._ids is not None:
            self._ids.go_on(piece.choice, piece.count, sent)
            place = f',"event_id":"{self._ids.current()}"'
        return f"{self._begin}{place},{fields}{rest}}}\n"


def entries_of(answer: Answer) -> ScoreEntries:
    """What makes entries of log-probabilities."""
    return ScoreEntries(answer.table, skips_special=answer.head.reply.skip_special_tokens)


def loaded(name: str, unix_s: int, *, is_chat: bool) -> bytes:
    """The reply to a request for no tokens."""
    rest = ',"done":true,"done_reason":"load"}'
    return f"{envelope(name, unix_s)},{said('', is_chat)}{rest}".encode()


def envelope(name: str, unix_s: int) -> str:
    """The fields that every line begins with, without the closing brace."""
    return compact({"model": name, "created_at": timestamp(unix_s)})[:-1]


def timestamp(unix_s: int) -> str:
    """A moment as RFC 3339 writes it."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def said(text: str, is_chat: bool, thinking: str = "", calls: Sequence[str] = ()) -> str:
    """What the model says, as the fields of its kind of reply: only chats have calls, each as JSON."""
    shown = encode_basestring(text)
    if thinking:
        shown += f',"thinking":{encode_basestring(thinking)}'
    if calls:
        listed = ",".join(calls)
        shown += f',"tool_calls":[{listed}]'
    return (
        f'"message":{{"role":"assistant","content":{shown}}}' if is_chat else f'"response":{shown}'
    )


def last_fields(answer: Answer, tokens: int, ending: Ending) -> str:
    """What the last line has behind its text, without the closing brace."""
    fields = {
        "done": True,
        "done_reason": FINISH_NAMES[ending.reason],
        **_durations(answer, ending),
        "prompt_eval_count": answer.prompt_tokens,
        "eval_count": tokens,
    }
    return f",{compact(fields)[1:-1]}"


def _durations(answer: Answer, ending: Ending) -> Mapping[str, int]:
    """In nanoseconds, by the clock of the gateway that followed the answer from its beginning; others know none."""
    timeline = answer.timeline
    if timeline is None:
        return {}
    queued_s = ending.queued_us / 1e6 if ending.HasField("queued_us") else 0.0
    prompt_s = (timeline.first_token or timeline.admitted) - timeline.admitted - queued_s
    return {
        "total_duration": round(timeline.total_s * _NS),
        "load_duration": 0,
        "prompt_eval_duration": max(0, round(prompt_s * _NS)),
        "eval_duration": round((timeline.decode_s or 0.0) * _NS),
    }
