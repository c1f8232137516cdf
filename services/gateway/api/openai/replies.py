"""OpenAI's replies: whole JSON bodies, and server-sent events made from a template with only the
text filled in.

Where resuming was asked for, every event carries an id (`event_id.py`) from which the stream can be
resumed: what follows is a pure fold over the logs. Without ids an event is its data alone.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from services.gateway.api.openai.logprobs import LogprobsWriter
from services.gateway.api.openai.usage import usage_object
from services.gateway.following.answer import Answer, Piece
from services.gateway.following.finish import FINISH_NAMES, stop_reason
from services.gateway.following.logprobs import TokenLogprob, prompt_entries
from tessera.common.v1.ending_pb2 import Ending
from tessera.scheduler.v1.queue_pb2 import ReplyKind, RequestSpec

_DONE = b"data: [DONE]\n\n"

_CHAT = ReplyKind.REPLY_KIND_CHAT


class ReplyWriter:
    """The reply to a chat or a completion. Everything but text and counts is written once, in the
    constructor.
    """

    def __init__(
        self,
        answer: Answer,
        with_ids: bool,
        reply_head: RequestSpec | None = None,
        first_index: int = 0,
    ) -> None:
        """`with_ids`: events have ids. Of several prompts in one reply, `reply_head` is the request
        that gives the reply its id, and `first_index` the index of the prompt's first choice.
        """
        self._answer = answer
        self._reply = reply = answer.head.reply
        self._is_chat = reply.kind == _CHAT
        self._first_index = first_index
        # Whose tokens `usage` adds up.
        self.of_reply: Sequence[ReplyWriter] = (self,)
        self._id = f"id: {answer.head.request_id}/" if with_ids else ""
        self._head = f"data: {_envelope(reply_head or answer.head, stream=True)}"
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
        self._places = progress.places()
        self._logprobs = _logprobs_writer(answer)
        self._is_plain = not (reply.return_token_ids or reply.continuous_usage or self._logprobs)

    def first(self) -> bytes:
        """The events before any token: for each choice its role, or the prompt where it is to be
        repeated. Due once the prompt's scores are known. Nothing for a client that has them.
        """
        if self._head_events is None:
            return b""
        scores = prompt_logprobs(self._answer)
        if not (self._is_chat or self._reply.echo or self._with_token_ids or scores is not None):
            return b""
        logprobs, inner, ids = "null", "", ""
        if self._with_token_ids:
            ids = f',"prompt_token_ids":{_compact(self._answer.prompt_ids)}'
        if self._is_chat:
            text = '"delta":{"role":"assistant","content":""}'
            if scores is not None:
                ids += f',"prompt_logprobs":{_compact(scores)}'
        else:
            text = f'"text":{encode_basestring(self._reply.prompt_text)}'
            if self._logprobs is not None:
                logprobs = _compact(self._logprobs.value(echoed(self._answer)))
            inner, ids = ids, ""
            if scores is not None:
                inner += f',"prompt_logprobs":{_compact(scores)}'
        events = []
        for index in range(self._head_events, len(self._counts)):
            name = self._first_index + index
            choice = f'{{"index":{name},{text},"logprobs":{logprobs},"finish_reason":null{inner}}}'
            tail = f"{self._usage()}{ids if index == 0 else ''}}}\n\n"
            is_last = index == len(self._counts) - 1
            place = self._place(None if is_last else f"h{index + 1}")
            events.append(f'{place}{self._head},"choices":[{choice}]{tail}')
        return "".join(events).encode()

    def piece(self, piece: Piece) -> bytes:
        """The event of one piece; nothing if the piece adds nothing yet."""
        self._counts[piece.choice] = piece.count
        if piece.ending is not None:
            self._places[piece.choice] = f"{piece.count}e"
            return self._last(piece, piece.ending)
        self._places[piece.choice] = str(piece.count)
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
        cached = sum(writer._answer.cached_tokens for writer in self.of_reply)
        usage = usage_object(*self._spent(), cached)
        event = f'{self._place()}{self._head},"choices":[],"usage":{_compact(usage)}}}\n\n'
        return event.encode() + _DONE

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """The body of a reply that is not streamed, of all pieces of all choices."""
        return json.dumps(_body(self._answer, pieces), ensure_ascii=False).encode()

    def _spent(self) -> tuple[int, int]:
        """Tokens of the reply's prompts and choices."""
        writers = self.of_reply
        prompt = sum(writer._answer.prompt_tokens for writer in writers)
        return prompt, sum(sum(writer._counts) for writer in writers)

    def _last(self, piece: Piece, ending: Ending) -> bytes:
        text = f"{self._field}{encode_basestring(piece.text)}{self._close_text}"
        if self._is_chat and not piece.text:
            text = '"delta":{}'
        index = self._first_index + piece.choice
        choice = f'{self._head},"choices":[{{"index":{index},{text}{self._scores(piece)}'
        reason = f'"{FINISH_NAMES[ending.reason]}","stop_reason":'
        reason += _compact(stop_reason(ending, self._answer.silent_ends))
        tail = f"{self._token_ids(piece)}}}]{self._usage()}}}\n\n"
        return f"{self._place()}{choice}{reason}{tail}".encode()

    def _place(self, place: str | None = None) -> str:
        """The line of the event's id: `place`, or where all choices are."""
        return f"{self._id}{place or '.'.join(self._places)}\n" if self._id else ""

    def _scores(self, piece: Piece) -> str:
        value = None if self._logprobs is None else self._logprobs.value(piece.logprobs)
        return f',"logprobs":{_compact(value)},"finish_reason":'

    def _token_ids(self, piece: Piece) -> str:
        if not self._with_token_ids:
            return ""
        return f',"token_ids":{_compact(piece.token_ids)}'

    def _usage(self) -> str:
        if not self._reply.continuous_usage:
            return self._no_usage
        usage = usage_object(*self._spent())
        return f',"usage":{_compact(usage)}'


def reply_writers(answers: Sequence[Answer], with_ids: bool) -> list[ReplyWriter]:
    """One for each prompt of a reply: choice j of prompt i has the index i * n + j."""
    head = answers[0].head
    n = head.sampling.n
    writers = [ReplyWriter(answer, with_ids, head, n * i) for i, answer in enumerate(answers)]
    for writer in writers:
        writer.of_reply = writers
    return writers


def whole_of_all(answers: Sequence[Answer], pieces: Sequence[Sequence[Piece]]) -> bytes:
    """The body of a reply to several prompts."""
    bodies = [_body(answer, of) for answer, of in zip(answers, pieces, strict=True)]
    content = {**bodies[0], "choices": []}
    for body in bodies:
        for choice in body["choices"]:
            choice["index"] = len(content["choices"])
            content["choices"].append(choice)
    usages = [body["usage"] for body in bodies]
    content["usage"] = usage_object(
        sum(usage["prompt_tokens"] for usage in usages),
        sum(usage["completion_tokens"] for usage in usages),
        sum(answer.cached_tokens for answer in answers),
    )
    return json.dumps(content, ensure_ascii=False).encode()


def _body(answer: Answer, pieces: Sequence[Piece]) -> dict[str, Any]:
    head = answer.head
    content: dict[str, Any] = json.loads(_envelope(head, stream=False) + "}")
    writer, scores = _logprobs_writer(answer), prompt_logprobs(answer)
    by_choice: list[list[Piece]] = [[] for _ in range(head.sampling.n)]
    for piece in pieces:
        by_choice[piece.choice].append(piece)
    content["choices"] = [_choice(answer, index, of, writer) for index, of in enumerate(by_choice)]
    count = sum(of[-1].count for of in by_choice)
    content["usage"] = usage_object(answer.prompt_tokens, count, answer.cached_tokens)
    of_prompt: dict[str, Any] = {}
    if scores is not None:
        of_prompt["prompt_logprobs"] = scores
    if head.reply.return_token_ids:
        of_prompt["prompt_token_ids"] = answer.prompt_ids
    # As in vLLM: a reply to one chat, but a choice of completions, which may have several prompts.
    for place in [content] if head.reply.kind == _CHAT else content["choices"]:
        place.update(of_prompt)
    return content


def prompt_logprobs(answer: Answer) -> list[Any] | None:
    """The value of `prompt_logprobs`, where it was asked for."""
    reply = answer.head.reply
    if not reply.HasField("prompt_logprobs"):
        return None
    assert answer.prompt_scores is not None and answer.prompt_ids is not None
    writer = LogprobsWriter(answer.table, is_chat=True, by_id=False, skip_special_tokens=False)
    return writer.prompt(answer.prompt_ids, answer.prompt_scores, reply.prompt_logprobs)


def echoed(answer: Answer) -> list[TokenLogprob]:
    """The prompt's part of `logprobs`, where the prompt is repeated."""
    if not answer.head.reply.echo:
        return []
    assert answer.prompt_scores is not None and answer.prompt_ids is not None
    k = answer.head.sampling.logprobs
    scores = [(own, top[:k]) for own, top in answer.prompt_scores]
    text = answer.head.reply.prompt_text
    return prompt_entries(answer.table, answer.prompt_ids, text, scores)


def _choice(
    answer: Answer, index: int, pieces: list[Piece], writer: LogprobsWriter | None
) -> dict[str, Any]:
    reply, ending = answer.head.reply, pieces[-1].ending
    assert ending is not None
    text = "".join(piece.text for piece in pieces)
    choice: dict[str, Any] = {"index": index}
    entries = [entry for piece in pieces for entry in piece.logprobs]
    if reply.kind == _CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = reply.prompt_text + text
        entries = echoed(answer) + entries if writer is not None else entries
    choice["logprobs"] = None if writer is None else writer.value(entries)
    choice["finish_reason"] = FINISH_NAMES[ending.reason]
    choice["stop_reason"] = stop_reason(ending, answer.silent_ends)
    if reply.return_token_ids:
        choice["token_ids"] = [token for piece in pieces for token in piece.token_ids]
    return choice


def _logprobs_writer(answer: Answer) -> LogprobsWriter | None:
    if not answer.head.sampling.HasField("logprobs"):
        return None
    reply = answer.head.reply
    return LogprobsWriter(
        answer.table,
        is_chat=reply.kind == _CHAT,
        by_id=reply.tokens_as_ids,
        skip_special_tokens=reply.skip_special_tokens,
    )


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
