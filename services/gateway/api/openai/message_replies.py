"""OpenAI's streamed replies that are divided into content, reasoning and calls of tools."""

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from services.gateway.api.compact_json import compact
from services.gateway.api.openai.replies import ReplyWriter
from services.gateway.api.openai.usage import Total
from services.gateway.following.answer import Answer, Piece
from services.gateway.following.answer_fold import MessagePiece
from services.gateway.following.event_id import FINISH_SENT
from services.gateway.following.message import call_id
from shared.output_format.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from tessera.common.v1.ending_pb2 import Ending
from tessera.scheduler.v1.queue_pb2 import ReplyKind

CALLS_TOOLS = "tool_calls"
_FUNCTION = ("function", "arguments")


def call_object(name: str, given: str, *, is_custom: bool) -> dict[str, Any]:
    """What a call is of, as OpenAI writes it. `given`: its arguments, or the input of a custom tool."""
    if is_custom:
        return {"type": "custom", "custom": {"name": name, "input": given}}
    return {"type": "function", "function": {"name": name, "arguments": given}}


class MessageWriter(ReplyWriter):
    """The reply to a chat, one event for each piece whatever it holds."""

    def piece(self, piece: Piece) -> bytes:
        """See `ReplyWriter`."""
        assert isinstance(piece, MessagePiece)
        self._counts[piece.choice] = piece.count
        if piece.ending is not None:
            if self._ids is not None:
                self._ids.go_on(piece.choice, piece.count, FINISH_SENT)
            return self._last(piece, piece.ending)
        if self._ids is not None:
            self._ids.go_on(piece.choice, piece.count)
        delta = self._delta(piece)
        if delta == "{}" and not (piece.logprobs or self._with_token_ids):
            return b""
        index = self._first_index + piece.choice
        begin = f'{self._place()}{self._head},"choices":[{{"index":{index},"delta":{delta}'
        tail = f"null{self._token_ids(piece)}}}]{self._usage()}}}\n\n"
        return f"{begin}{self._scores(piece)}{tail}".encode()

    def _last_text(self, piece: Piece) -> str:
        assert isinstance(piece, MessagePiece)
        return f'"delta":{self._delta(piece)}'

    def _finish(self, piece: Piece, ending: Ending) -> str:
        assert isinstance(piece, MessagePiece)
        return CALLS_TOOLS if piece.calls_tools else super()._finish(piece, ending)

    def _delta(self, piece: MessagePiece) -> str:
        content = reasoning = ""
        for delta in piece.deltas:
            match delta:
                case Content():
                    content += delta.text
                case Reasoning():
                    reasoning += delta.text
        fields = []
        if reasoning:
            text = encode_basestring(reasoning)
            fields += [f'"reasoning_content":{text}', f'"reasoning":{text}']
        if content:
            fields.append(f'"content":{encode_basestring(content)}')
        calls = self._calls(piece.deltas, piece.choice)
        if calls:
            fields.append(f'"tool_calls":{compact(calls)}')
        return f"{{{','.join(fields)}}}"

    def _calls(self, deltas: Sequence[Delta], choice: int) -> list[dict[str, Any]]:
        """What is new of calls: an entry for each."""
        found: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            match delta:
                case CallBegin():
                    found[delta.call] = {
                        "index": delta.call,
                        "id": call_id(self._answer.head.request_id, choice, delta.call),
                        **call_object(delta.name, "", is_custom=delta.is_custom),
                    }
                case CallArguments():
                    kind, field = ("custom", "input") if delta.is_custom else _FUNCTION
                    call = found.setdefault(delta.call, {"index": delta.call, kind: {field: ""}})
                    call[kind][field] += delta.text
        return list(found.values())


WRITERS: Mapping[int, type[ReplyWriter]] = {
    ReplyKind.REPLY_KIND_CHAT: ReplyWriter,
    ReplyKind.REPLY_KIND_CHAT_MESSAGE: MessageWriter,
    ReplyKind.REPLY_KIND_COMPLETION: ReplyWriter,
}


def reply_writers(answers: Sequence[Answer], with_ids: bool) -> list[ReplyWriter]:
    """One for each prompt of a reply: choice j of prompt i has the index i * n + j."""
    head = answers[0].head
    n = head.sampling.n
    total = Total()
    make = WRITERS[head.reply.kind]
    return [make(answer, with_ids, head, n * i, total) for i, answer in enumerate(answers)]
