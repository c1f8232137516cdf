"""OpenAI's streamed replies: server-sent events made from a template with only the text filled in (`whole.py` has the
others).

Where resuming was asked for, every event carries an id (`event_id.py`) from which the stream can be
resumed: what follows is a pure fold over the logs. Without ids an event is its data alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring

from services.gateway.api.compact_json import compact
from services.gateway.api.error_object import error_body
from services.gateway.api.openai.logprobs import LogprobsWriter
from services.gateway.api.openai.usage import Total, usage_object
from services.gateway.api.server_sent_events import (
    AFTER_COMMENT,
    COMMENT,
    COMMENT_BESIDE_IDS,
    MEDIA_TYPE,
)
from services.gateway.endings import FINISH_NAMES, stop_reason
from services.gateway.following.answer import Answer, Piece
from services.gateway.following.event_id import FINISH_SENT, EventIds
from services.gateway.following.logprobs import TokenLogprob, prompt_entries
from services.gateway.reply_kinds import CHATS
from shared.errors import ServingError
from tessera.common.v1.ending_pb2 import Ending
from tessera.scheduler.v1.queue_pb2 import ReplyKind, RequestSpec

# `json.dumps` makes one for each call.
# Token ids that are written at once.
_IDS = 4096
_DONE = b"data: [DONE]\n\n"

# What stands before the request's id in a reply's.
ID_PREFIXES: Mapping[int, str] = {
    ReplyKind.REPLY_KIND_CHAT: "chatcmpl-",
    ReplyKind.REPLY_KIND_CHAT_MESSAGE: "chatcmpl-",
    ReplyKind.REPLY_KIND_COMPLETION: "cmpl-",
}


class ReplyWriter:
    """The reply to a chat or a completion. Everything but text and counts is written once, in the
    constructor.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self,
        answer: Answer,
        with_ids: bool,
        reply_head: RequestSpec | None = None,
        first_index: int = 0,
        total: Total | None = None,
    ) -> None:
        """`with_ids`: events have ids. Of several prompts in one reply, `reply_head` is the request
        that gives the reply its id, `first_index` the index of the prompt's first choice, and `total` one for all.
        """
        self._answer = answer
        self._reply = reply = answer.head.reply
        self._is_chat = reply.kind in CHATS
        self._first_index = first_index
        self._ids: EventIds | None = None
        if with_ids:
            self._ids = EventIds(answer.head.request_id, answer.progress)
        self.ping = COMMENT_BESIDE_IDS if with_ids else COMMENT
        self.after_ping = b"" if with_ids else AFTER_COMMENT
        self._head = f"data: {envelope(reply_head or answer.head, stream=True)}"
        self._field = '"delta":{"content":' if self._is_chat else '"text":'
        self._close_text = "}" if self._is_chat else ""
        self._no_usage = ',"usage":null' if reply.include_usage else ""
        self._plain_tail = (
            f'{self._close_text},"logprobs":null,"finish_reason":null}}]{self._no_usage}}}\n\n'
        )
        self._with_token_ids = reply.return_token_ids
        self._begins = [
            f'{self._head},"choices":[{{"index":{first_index + index},{self._field}'
            for index in range(answer.head.sampling.n)
        ]
        progress = answer.progress
        self._head_events = progress.head_events
        self._counts = list(progress.counts)
        self._total = total or Total()
        self._total.answers.append(answer)
        self._total.counts.append(self._counts)
        self._logprobs = logprobs_writer(answer)
        self._is_plain = not (reply.return_token_ids or reply.continuous_usage or self._logprobs)

    def accepted(self) -> bytes:
        """Nothing: a stream begins with its first choice."""
        return b""

    def first(self) -> Iterator[str]:
        """The events before any token: for each choice its role, or the prompt where it is to be
        repeated. Due once the prompt's scores are known. Nothing for a client that has them.
        """
        if self._head_events is None:
            return
        reply = self._reply
        has_scores = reply.HasField("prompt_logprobs")
        if not (self._is_chat or reply.echo or self._with_token_ids or has_scores):
            return
        for index in range(self._head_events, len(self._counts)):
            yield from self._first_of(index)

    def _first_of(self, index: int) -> Iterator[str]:
        """The event before the tokens of a choice. What is said of the prompt stands in a choice of completions, and
        of chats beside the first one, as far as it is ids.
        """
        is_last = index == len(self._counts) - 1
        place = self._place() if is_last else self._place_of_head(index + 1)
        name = self._first_index + index
        yield f'{place}{self._head},"choices":[{{"index":{name},'
        if self._is_chat:
            yield '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            yield self._usage()
            if index == 0:
                yield from self._of_prompt()
        else:
            yield f'"text":{encode_basestring(self._reply.prompt_text)},"logprobs":'
            writer = self._logprobs
            yield from ("null",) if writer is None else writer.value(echoed(self._answer))
            yield ',"finish_reason":null'
            yield from self._of_prompt()
            yield f"}}]{self._usage()}"
        yield "}\n\n"

    def _of_prompt(self) -> Iterator[str]:
        if self._with_token_ids:
            yield from id_list("prompt_token_ids", self._answer.prompt_ids or ())
        yield from scores_of_prompt(self._answer)

    def piece(self, piece: Piece) -> bytes:
        """The event of one piece; nothing if the piece adds nothing yet."""
        self._counts[piece.choice] = piece.count
        if piece.ending is not None:
            if self._ids is not None:
                self._ids.go_on(piece.choice, piece.count, FINISH_SENT)
            return self._last(piece, piece.ending)
        if self._ids is not None:
            self._ids.go_on(piece.choice, piece.count)
        # Where a token gives no text, an event is only due if ids or log-probabilities are wanted.
        if not (piece.text or piece.logprobs or self._with_token_ids):
            return b""
        begin = f"{self._place()}{self._begins[piece.choice]}"
        text = encode_basestring(piece.text)
        if self._is_plain:
            return f"{begin}{text}{self._plain_tail}".encode()
        tail = f"null{self._token_ids(piece)}}}]{self._usage()}}}\n\n"
        return f"{begin}{text}{self._close_text}{self._scores(piece)}{tail}".encode()

    def end(self) -> bytes:
        """`[DONE]`, and before it, where that was asked for, an event with the usage and empty `choices`."""
        if not self._reply.include_usage:
            return _DONE
        total = self._total
        usage = usage_object(*total.spent(), total.cached(), total.reasoning())
        event = f'{self._place()}{self._head},"choices":[],"usage":{compact(usage)}}}\n\n'
        return event.encode() + _DONE

    def failure(self, error: ServingError) -> bytes:
        """An event with the error; the stream has no `[DONE]` then."""
        return b"data: " + error_body(error) + b"\n\n"

    def _last(self, piece: Piece, ending: Ending) -> bytes:
        text = self._last_text(piece)
        index = self._first_index + piece.choice
        choice = f'{self._head},"choices":[{{"index":{index},{text}{self._scores(piece)}'
        reason = f'"{self._finish(piece, ending)}","stop_reason":'
        reason += compact(stop_reason(ending, self._answer.silent_ends))
        tail = f"{self._token_ids(piece)}}}]{self._usage()}}}\n\n"
        return f"{self._place()}{choice}{reason}{tail}".encode()

    def _last_text(self, piece: Piece) -> str:
        """What the last event of a choice adds to its text."""
        if self._is_chat and not piece.text:
            return '"delta":{}'
        return f"{self._field}{encode_basestring(piece.text)}{self._close_text}"

    def _finish(self, piece: Piece, ending: Ending) -> str:
        return FINISH_NAMES[ending.reason]

    def _place(self) -> str:
        """The line of the event's id: where all choices are."""
        return "" if self._ids is None else f"id: {self._ids.current()}\n"

    def _place_of_head(self, events: int) -> str:
        return "" if self._ids is None else f"id: {self._ids.of_head(events)}\n"

    def _scores(self, piece: Piece) -> str:
        value = "null"
        if self._logprobs is not None:
            value = "".join(self._logprobs.value(piece.logprobs))
        return f',"logprobs":{value},"finish_reason":'

    def _token_ids(self, piece: Piece) -> str:
        if not self._with_token_ids:
            return ""
        return f',"token_ids":[{",".join(map(str, piece.token_ids))}]'

    def _usage(self) -> str:
        if not self._reply.continuous_usage:
            return self._no_usage
        usage = usage_object(*self._total.spent())
        return f',"usage":{compact(usage)}'


def prompt_logprobs(answer: Answer) -> Iterator[str] | None:
    """The value of `prompt_logprobs` as JSON in pieces, where it was asked for."""
    reply = answer.head.reply
    if not reply.HasField("prompt_logprobs"):
        return None
    assert answer.prompt_scores is not None and answer.prompt_ids is not None
    writer = LogprobsWriter(answer.table, is_chat=True, by_id=False, skip_special_tokens=False)
    return writer.prompt(answer.prompt_ids, answer.prompt_scores, reply.prompt_logprobs)


def scores_of_prompt(answer: Answer) -> Iterator[str]:
    """`prompt_logprobs` as one more field, where it was asked for."""
    scores = prompt_logprobs(answer)
    if scores is not None:
        yield ',"prompt_logprobs":'
        yield from scores


def id_list(name: str, ids: Sequence[int]) -> Iterator[str]:
    """Token ids as one more field."""
    yield f',"{name}":['
    for start in range(0, len(ids), _IDS):
        yield f"{',' if start else ''}{','.join(map(str, ids[start : start + _IDS]))}"
    yield "]"


def echoed(answer: Answer) -> Iterator[TokenLogprob]:
    """The prompt's part of `logprobs`, where the prompt is repeated."""
    if not answer.head.reply.echo:
        return iter(())
    assert answer.prompt_scores is not None and answer.prompt_ids is not None
    k = answer.head.sampling.logprobs
    scores = ((own, top[:k]) for own, top in answer.prompt_scores)
    text = answer.head.reply.prompt_text
    return prompt_entries(answer.table, answer.prompt_ids, text, scores)


def logprobs_writer(answer: Answer) -> LogprobsWriter | None:
    """What writes its `logprobs`, where they were asked for."""
    if not answer.head.sampling.HasField("logprobs"):
        return None
    reply = answer.head.reply
    return LogprobsWriter(
        answer.table,
        is_chat=reply.kind in CHATS,
        by_id=reply.tokens_as_ids,
        skip_special_tokens=reply.skip_special_tokens,
    )


def envelope(head: RequestSpec, *, stream: bool) -> str:
    """The fields that every body and event begins with, without the closing brace."""
    kind = "text_completion"
    if head.reply.kind in CHATS:
        kind = "chat.completion.chunk" if stream else "chat.completion"
    fields = {
        "id": ID_PREFIXES[head.reply.kind] + head.request_id,
        "object": kind,
        "created": head.created_unix_s,
        "model": head.model,
    }
    return compact(fields)[:-1]
