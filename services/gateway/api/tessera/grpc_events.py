"""The events of the gRPC API."""

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice

from services.gateway.api.token_scores import piece_of
from services.gateway.endings import stop_reason
from services.gateway.following.answer import Answer, Piece
from services.gateway.following.answer_fold import MessagePiece
from services.gateway.following.event_id import FINISH_SENT, OPEN, TEXT_SENT, EventIds
from services.gateway.following.logprobs import TokenLogprob, prompt_entries
from services.gateway.following.message import call_id
from services.gateway.following.writer import Writer
from shared.output_format.deltas import CallArguments, CallBegin, Reasoning
from tessera.gateway.v1 import chat_pb2
from tessera.gateway.v1.chat_pb2 import (
    ChatEvent,
    Delta,
    Finished,
    PromptLogprobs,
    ToolCallDelta,
    Usage,
)

# Log-probabilities in one event about a prompt: of more there are several events. Made at once are fewer.
_EVENT_VALUES = 100_000
_SLICE_VALUES = 512


async def events(answer: Answer) -> AsyncIterator[ChatEvent]:
    """The events of one answer from where the client is; closes it before the last."""
    writer: Writer[Sequence[ChatEvent], Sequence[ChatEvent]] = ChatEventWriter(answer)
    for event in writer.accepted():
        yield event
    begun = False
    while not answer.ended:
        # Nothing on silence: keepalive pings hold the connection.
        pieces = await answer.next() if begun or answer.prompt_scores is None else []
        if not begun and answer.prompt_scores is not None:
            begun = True
            for part in writer.first():
                for event in part:
                    yield event
                await answer.slices.turn()
        for piece in pieces:
            for event in writer.piece(piece):
                yield event
    answer.close()
    for event in writer.end():
        yield event


class ChatEventWriter:
    """Makes the events of one answer. What fails ends the call with a status, so there is no event for it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._ids = EventIds(answer.head.request_id, answer.progress)
        reply = answer.head.reply
        # How many events come before any token, and how many of them the client has.
        self._head_size = 1
        if reply.HasField("prompt_logprobs"):
            self._head_size += _events_of_prompt(answer.prompt_tokens, reply.prompt_logprobs)
        if reply.echo:
            sampling = answer.head.sampling
            each = 1
            if sampling.HasField("logprobs"):
                each = _events_of_prompt(answer.prompt_tokens, sampling.logprobs)
            self._head_size += each * sampling.n
        had = answer.progress.head_events
        self._had = self._head_size if had is None else min(had, self._head_size)
        self._head_events = 0
        self._with_ids = reply.return_token_ids
        table = answer.table
        self._shown = table.shown_pieces if reply.skip_special_tokens else table.pieces

    def accepted(self) -> Sequence[ChatEvent]:
        """The event that the request is in the queue."""
        answer = self._answer
        shown = answer.prompt_ids if self._with_ids else None
        accepted = chat_pb2.Accepted(
            request_id=answer.head.request_id,
            model=answer.head.model,
            prompt_tokens=answer.prompt_tokens,
            prompt_token_ids=shown,
        )
        return self._head_event(ChatEvent(accepted=accepted))

    def first(self) -> Iterator[Sequence[ChatEvent]]:
        """The events about the prompt: nothing where one is not whole yet."""
        if self._had == self._head_size:
            return
        for event in self._about_prompt():
            yield () if event is None else self._head_event(event)

    def _about_prompt(self) -> Iterator[ChatEvent | None]:
        reply, sampling = self._answer.head.reply, self._answer.head.sampling
        if reply.HasField("prompt_logprobs"):
            for some in self._slices_of_prompt(reply.prompt_logprobs):
                if some is None:
                    yield None
                    continue
                yield ChatEvent(prompt_logprobs=PromptLogprobs(tokens=some))
        for choice in range(sampling.n if reply.echo else 0):
            delta = Delta(choice=choice, text=reply.prompt_text)
            if sampling.HasField("logprobs"):
                for some in self._slices_of_prompt(sampling.logprobs):
                    if some is None:
                        yield None
                        continue
                    delta.logprobs.extend(some)
                    yield ChatEvent(delta=delta)
                    delta = Delta(choice=choice)
            else:
                yield ChatEvent(delta=delta)

    def _head_event(self, event: ChatEvent) -> Sequence[ChatEvent]:
        """The event with its id, unless the client has it."""
        self._head_events += 1
        if self._head_events <= self._had:
            return ()
        is_last = self._head_events == self._head_size
        event.event_id = self._ids.current() if is_last else self._ids.of_head(self._head_events)
        return (event,)

    def piece(self, piece: Piece) -> Sequence[ChatEvent]:
        """A delta if it adds something, and the end of the choice."""
        # The last delta has all text, also what was held back; the end is an event of its own.
        end = OPEN if piece.ending is None else TEXT_SENT
        self._ids.go_on(piece.choice, piece.count, end)
        found: list[ChatEvent] = []
        token_ids = piece.token_ids if self._with_ids else None
        reasoning, calls = _divided(piece, self._answer.head.request_id)
        if piece.text or token_ids or piece.logprobs or reasoning or calls:
            delta = Delta(
                choice=piece.choice,
                text=piece.text,
                token_ids=token_ids,
                logprobs=self._entries(piece.logprobs),
                reasoning=reasoning,
                tool_calls=calls,
            )
            found.append(ChatEvent(event_id=self._ids.current(), delta=delta))
        if piece.ending is not None:
            ending = piece.ending
            finished = Finished(choice=piece.choice, reason=ending.reason, stop=ending.stop)
            finished.calls_tools = isinstance(piece, MessagePiece) and piece.calls_tools
            stop = stop_reason(ending, self._answer.silent_ends)
            if isinstance(stop, int):
                finished.stop_token_id = stop
            self._ids.go_on(piece.choice, piece.count, FINISH_SENT)
            found.append(ChatEvent(event_id=self._ids.current(), finished=finished))
        return found

    def end(self) -> Sequence[ChatEvent]:
        """The usage."""
        answer = self._answer
        usage = Usage(
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            reasoning_tokens=answer.reasoning_tokens,
        )
        return (ChatEvent(event_id=self._ids.current(), usage=usage),)

    def _prompt(self, k: int) -> Iterator[TokenLogprob]:
        answer = self._answer
        assert answer.prompt_scores is not None and answer.prompt_ids is not None
        scores = ((own, top[:k]) for own, top in answer.prompt_scores)
        text = answer.head.reply.prompt_text
        return prompt_entries(answer.table, answer.prompt_ids, text, scores)

    def _slices_of_prompt(self, k: int) -> Iterator[list[chat_pb2.TokenLogprob] | None]:
        """The prompt's tokens with `k` top ones each, as many of them as an event has; None where more of them are to
        come, and others have had no turn for a while.
        """
        tokens = self._prompt(k)
        size = max(1, _SLICE_VALUES // (1 + k))
        for _ in range(_events_of_prompt(self._answer.prompt_tokens, k)):
            found: list[chat_pb2.TokenLogprob] = []
            left = _tokens_of_event(k)
            while left > 0:
                some = list(islice(tokens, min(left, size)))
                found += self._entries(some)
                left = left - len(some) if some else 0
                if left > 0:
                    yield None
            yield found

    def _entries(self, entries: Sequence[TokenLogprob]) -> list[chat_pb2.TokenLogprob]:
        return [
            chat_pb2.TokenLogprob(
                token_id=entry.token,
                token=entry.data,
                logprob=entry.logprob,
                text_offset=entry.offset,
                top=[
                    chat_pb2.TopLogprob(
                        token_id=token, token=piece_of(self._shown, token), logprob=value
                    )
                    for token, value in entry.top
                ],
            )
            for entry in entries
        ]


def _divided(piece: Piece, request_id: str) -> tuple[str, list[ToolCallDelta]]:
    """The reasoning and the calls of a piece."""
    if not isinstance(piece, MessagePiece):
        return "", []
    reasoning, calls = "", []
    for delta in piece.deltas:
        match delta:
            case Reasoning():
                reasoning += delta.text
            case CallBegin():
                name = call_id(request_id, piece.choice, delta.call)
                calls.append(ToolCallDelta(index=delta.call, id=name, name=delta.name))
            case CallArguments():
                calls.append(ToolCallDelta(index=delta.call, arguments=delta.text))
    return reasoning, calls


def _tokens_of_event(k: int) -> int:
    return max(1, _EVENT_VALUES // (1 + k))


def _events_of_prompt(tokens: int, k: int) -> int:
    return max(1, -(-tokens // _tokens_of_event(k)))
