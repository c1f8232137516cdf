"""Ollama's replies that are divided into content, thoughts and calls of tools. A call comes when it is whole, for its
arguments are an object.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from json.encoder import encode_basestring

from services.gateway.api.ollama.replies import (
    CHATS,
    LineWriter,
    entries_of,
    envelope,
    last_fields,
    said,
)
from services.gateway.following.answer import Answer, Outcome, Piece
from services.gateway.following.answer_fold import MessagePiece
from services.gateway.following.event_id import OPEN
from services.gateway.following.message import call_id
from shared.output_format.deltas import CallArguments, CallBegin, CallEnd, Delta, Reasoning


def make_writer(answer: Answer, with_ids: bool) -> LineWriter:
    """The writer of an answer's stream."""
    kind = MessageLineWriter if answer.head.reply.HasField("message") else LineWriter
    return kind(answer, with_ids)


class MessageLineWriter(LineWriter):
    """A line for each piece, whatever it holds, and one for the end."""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        super().__init__(answer, with_ids)
        self._calls = Calls(answer.head.request_id)
        self._has_caught_up = False

    def said(self, piece: Piece) -> str:
        """See `LineWriter`."""
        assert isinstance(piece, MessagePiece)
        self._catch_up()
        calls = self._calls.take(piece.deltas)
        if piece.ending is not None and self._answer.progress.ends[0] == OPEN:
            calls += self._calls.end()
        thinking = thought(piece.deltas)
        if not (piece.text or thinking or calls):
            return ""
        return said(piece.text, self._is_chat, thinking, calls)

    def _catch_up(self) -> None:
        """Takes what the client has: a call may have begun there."""
        if self._has_caught_up:
            return
        self._has_caught_up = True
        has = self._answer.progress.counts[0]
        if has:
            piece = self._answer.fold(0).push([*self._answer.token_ids(0)[:has]], None)
            assert isinstance(piece, MessagePiece)
            self._calls.take(piece.deltas)


def whole(answer: Answer, outcome: Outcome) -> Iterator[str]:
    """The reply to a request without a stream, once its answer has ended."""
    head, message = answer.head, outcome.message
    is_chat = head.reply.kind in CHATS
    fields = said(outcome.text, is_chat)
    if message is not None:
        calls = Calls(head.request_id)
        found = [*calls.take(message.deltas), *calls.end()]
        fields = said(outcome.text, is_chat, message.reasoning, found)
    yield f"{envelope(head.model, head.created_unix_s)},{fields}"
    if head.sampling.HasField("logprobs"):
        yield from _scores(answer)
    yield f"{last_fields(answer, outcome.tokens, outcome.ending)}}}"


def _scores(answer: Answer) -> Iterator[str]:
    """The field with the log-probabilities of all tokens, in pieces: there may be many."""
    entries, scores = entries_of(answer), answer.logprobs(0)
    before = ',"logprobs":['
    while some := [*islice(scores, _ENTRIES)]:
        yield before + json.dumps(entries.listed(some), ensure_ascii=False)[1:-1]
        before = ","
    yield "]" if before == "," else f"{before}]"


def thought(deltas: Iterable[Delta]) -> str:
    """The thoughts among them."""
    return "".join([delta.text for delta in deltas if isinstance(delta, Reasoning)])


# Log-probabilities that are written at once.
_ENTRIES = 64
# Line ends between values: within a text JSON has none.
_ON_ONE_LINE = str.maketrans("\r\n", "  ")


@dataclass(slots=True)
class _Open:
    """A call that is not whole."""

    index: int
    name: str
    texts: list[str] = field(default_factory=list)

    def arguments(self) -> str | None:
        """The JSON of an object as the model wrote it, on one line; None where they are none."""
        text = "".join(self.texts)
        try:
            is_object = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            return None
        return text.translate(_ON_ONE_LINE) if is_object else None


class Calls:
    """Makes calls of deltas, each as JSON."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._open: _Open | None = None

    def take(self, deltas: Sequence[Delta]) -> list[str]:
        """The calls that become whole by them."""
        found: list[str] = []
        for delta in deltas:
            match delta:
                case CallBegin(index, name):
                    found += self.end()
                    self._open = _Open(index, name)
                case CallArguments(_, text) if self._open is not None:
                    self._open.texts.append(text)
                case CallEnd() if self._open is not None:
                    call, self._open = self._open, None
                    found.append(self._written(call, call.arguments() or "{}"))
        return found

    def end(self) -> list[str]:
        """The call that is left open, if its arguments are whole: one that is cut off within them is left out."""
        call, self._open = self._open, None
        arguments = call.arguments() if call is not None else None
        return [] if call is None or arguments is None else [self._written(call, arguments)]

    def _written(self, call: _Open, arguments: str) -> str:
        name, tool = call_id(self._request_id, 0, call.index), encode_basestring(call.name)
        function = f'{{"index":{call.index},"name":{tool},"arguments":{arguments}}}'
        return f'{{"id":"{name}","function":{function}}}'
