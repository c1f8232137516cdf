"""OpenAI's replies: whole JSON bodies, and server-sent events made from a template with only the
text filled in.

Every event carries `id: <request id>/<tokens folded so far>`, with `e` appended once the choice has
ended: from there a stream can be resumed, because what follows is a pure fold over the log.
"""

import json
from collections.abc import Collection
from json.encoder import encode_basestring
from typing import Any

from services.gateway.answer import Piece
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import ReplyKind, RequestSpec

HEARTBEAT = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

_REASONS = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}
_CHAT = ReplyKind.REPLY_KIND_CHAT


class EventWriter:
    """The events of one stream, as bytes. Everything but text and counts is written once, in the
    constructor.
    """

    def __init__(
        self,
        head: RequestSpec,
        prompt_tokens: int,
        prompt_ids: list[int] | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """`prompt_ids` where the client asked for token ids."""
        reply = head.reply
        self._eos_token_ids = eos_token_ids
        self._is_chat = reply.kind == _CHAT
        self._reply = reply
        self._prompt_tokens = prompt_tokens
        self._prompt_ids = prompt_ids
        self._id = f"id: {head.request_id}/"
        self._head = f"\ndata: {_envelope(head, stream=True)}"
        field = '"delta":{"content":' if self._is_chat else '"text":'
        self._before_text = f'{self._head},"choices":[{{"index":0,{field}'
        self._after_text = ("}" if self._is_chat else "") + ',"logprobs":null,"finish_reason":'
        self._no_usage = ',"usage":null' if reply.include_usage else ""
        # Where a token gives no text, an event is only due if ids or counts are wanted.
        self._every_token = reply.return_token_ids
        self._plain_tail = f"{self._after_text}null}}]{self._no_usage}}}\n\n"
        self._is_plain = not (reply.return_token_ids or reply.continuous_usage)

    def first(self) -> bytes:
        """The event before any token: the role, or the prompt where it is to be repeated."""
        ids = ""
        if self._prompt_ids is not None:
            ids = f',"prompt_token_ids":{_compact(self._prompt_ids)}'
        if self._is_chat:
            text = '"delta":{"role":"assistant","content":""},"logprobs":null'
        elif self._reply.echo or ids:
            text = f'"text":{encode_basestring(self._reply.prompt_text)},"logprobs":null'
        else:
            return b""
        tail = f"{self._usage(0)}{ids}}}\n\n"
        choice = f'{{"index":0,{text},"finish_reason":null}}'
        return f'{self._id}0{self._head},"choices":[{choice}]{tail}'.encode()

    def piece(self, piece: Piece) -> bytes:
        """The event of one piece; nothing if the piece has nothing to tell yet."""
        if piece.ending is not None:
            return self._last(piece, piece.ending)
        if not piece.text and not self._every_token:
            return b""
        text = encode_basestring(piece.text)
        if self._is_plain:
            return f"{self._id}{piece.count}{self._before_text}{text}{self._plain_tail}".encode()
        tail = f"{self._token_ids(piece)}}}]{self._usage(piece.count)}}}\n\n"
        content = f"{self._before_text}{text}{self._after_text}null{tail}"
        return f"{self._id}{piece.count}{content}".encode()

    def usage(self, count: int, cached: int) -> bytes:
        """The event after the last one, with empty `choices`; nothing unless it was asked for."""
        if not self._reply.include_usage:
            return b""
        usage = _compact(usage_object(self._prompt_tokens, count, cached))
        return f'{self._id}{count}e{self._head},"choices":[],"usage":{usage}}}\n\n'.encode()

    def _last(self, piece: Piece, ending: Ending) -> bytes:
        if piece.text or not self._is_chat:
            text = f"{self._before_text}{encode_basestring(piece.text)}{self._after_text}"
        else:
            text = f'{self._head},"choices":[{{"index":0,"delta":{{{self._after_text}'
        reason = f'"{_REASONS[ending.reason]}","stop_reason":{_compact(stop_reason(ending, self._eos_token_ids))}'
        tail = f"{self._token_ids(piece)}}}]{self._usage(piece.count)}}}\n\n"
        return f"{self._id}{piece.count}e{text}{reason}{tail}".encode()

    def _token_ids(self, piece: Piece) -> str:
        if not self._reply.return_token_ids:
            return ""
        return f',"token_ids":{_compact(piece.token_ids)}'

    def _usage(self, count: int) -> str:
        if not self._reply.continuous_usage:
            return self._no_usage
        return f',"usage":{_compact(usage_object(self._prompt_tokens, count))}'


def whole_body(
    head: RequestSpec,
    pieces: list[Piece],
    prompt_tokens: int,
    prompt_ids: list[int] | None = None,
    eos_token_ids: Collection[int] = (),
) -> bytes:
    """The body of a reply that is not streamed; the last piece has the ending."""
    last = pieces[-1]
    assert last.ending is not None
    text = "".join(piece.text for piece in pieces)
    choice: dict[str, Any] = {"index": 0}
    if head.reply.kind == _CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = head.reply.prompt_text + text
    choice["logprobs"] = None
    choice["finish_reason"] = _REASONS[last.ending.reason]
    choice["stop_reason"] = stop_reason(last.ending, eos_token_ids)
    content = json.loads(_envelope(head, stream=False) + "}")
    content["choices"] = [choice]
    content["usage"] = usage_object(prompt_tokens, last.count, last.ending.cached_tokens)
    if head.reply.return_token_ids:
        choice["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        content["prompt_token_ids"] = prompt_ids
    return json.dumps(content, ensure_ascii=False).encode()


def usage_object(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """OpenAI's `usage`; `cached` once it is known."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def stop_reason(ending: Ending, eos_token_ids: Collection[int]) -> str | int | None:
    """vLLM's `stop_reason`: the stop string or stop id that was found; null at the model's own end
    or the limit.
    """
    if ending.stop:
        return ending.stop
    if ending.HasField("stop_token_id") and ending.stop_token_id not in eos_token_ids:
        return ending.stop_token_id
    return None


def _envelope(head: RequestSpec, *, stream: bool) -> str:
    """The fields that every body and event begins with, without the closing brace."""
    if head.reply.kind == _CHAT:
        prefix, kind = "chatcmpl-", "chat.completion.chunk" if stream else "chat.completion"
    else:
        prefix, kind = "cmpl-", "text_completion"
    fields = {
        "id": prefix + head.request_id,
        "object": kind,
        "created": head.created_unix_s,
        "model": head.model,
    }
    return _compact(fields)[:-1]


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
