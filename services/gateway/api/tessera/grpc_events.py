"""The events of the gRPC API."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice

from services.gateway.following.answer import Answer, Piece
from services.gateway.following.event_id import FINISH_SENT, OPEN, TEXT_SENT
from services.gateway.following.finish import stop_reason
from services.gateway.following.logprobs import TokenLogprob, prompt_entries
from tessera.gateway.v1 import chat_pb2
from tessera.gateway.v1.chat_pb2 import ChatEvent, Delta, Finished, PromptLogprobs, Usage

# Log-probabilities in one event about a prompt: of more there are several events. Made at once are fewer.
_EVENT_VALUES = 100_000
_SLICE_VALUES = 512


async def events(answer: Answer) -> AsyncIterator[ChatEvent]:
    """The events of one answer from where the client is; closes it before the last."""
    writer = _ChatEvents(answer)
    for event in writer.accepted():
        yield event
    begun = False
    while not answer.ended:
        # Nothing on silence: keepalive pings hold the connection.
        pieces = await answer.next() if begun or answer.prompt_scores is None else []
        if not begun and answer.prompt_scores is not None:
            begun = True
            async for event in writer.prompt():
                yield event
        for piece in pieces:
            for event in writer.piece(piece):
                yield event
    answer.close()
    yield writer.usage()


class _ChatEvents:
    """Makes the events of one answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rid = answer.head.request_id
        self._places = answer.progress.places()
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
            self._head_size += each * len(self._places)
        had = answer.progress.head_events
        self._had = self._head_size if had is None else min(had, self._head_size)
        self._head_events = 0
        self._with_ids = reply.return_token_ids
        table = answer.table
        self._shown = table.shown_pieces if reply.skip_special_tokens else table.pieces

    def accepted(self) -> Iterable[ChatEvent]:
        """The event that the request is in the queue."""
        answer = self._answer
        shown = answer.prompt_ids if self._with_ids else None
        accepted = chat_pb2.Accepted(
            request_id=answer.head.request_id,
            model=answer.head.model,
            prompt_tokens=answer.prompt_tokens,
            prompt_token_ids=shown,
        )
        yield from self._head_event(ChatEvent(accepted=accepted))

    async def prompt(self) -> AsyncIterator[ChatEvent]:
        """The events about the prompt, once its scores are known."""
        if self._had == self._head_size:
            return
        async for event in self._about_prompt():
            for shown in self._head_event(event):
                yield shown

    async def _about_prompt(self) -> AsyncIterator[ChatEvent]:
        reply, sampling = self._answer.head.reply, self._answer.head.sampling
        if reply.HasField("prompt_logprobs"):
            async for some in self._slices_of_prompt(reply.prompt_logprobs):
                yield ChatEvent(prompt_logprobs=PromptLogprobs(tokens=some))
        for choice in range(sampling.n if reply.echo else 0):
            delta = Delta(choice=choice, text=reply.prompt_text)
            if sampling.HasField("logprobs"):
                async for some in self._slices_of_prompt(sampling.logprobs):
                    delta.logprobs.extend(some)
                    yield ChatEvent(delta=delta)
                    delta = Delta(choice=choice)
            else:
                yield ChatEvent(delta=delta)

    def _head_event(self, event: ChatEvent) -> Iterable[ChatEvent]:
        """The event with its id, unless the client has it."""
        self._head_events += 1
        if self._head_events > self._had:
            is_last = self._head_events == self._head_size
            event.event_id = self._place() if is_last else f"{self._rid}/h{self._head_events}"
            yield event

    def piece(self, piece: Piece) -> Iterable[ChatEvent]:
        """A delta if it adds something, and the end of the choice."""
        # The last delta has all text, also what was held back; the end is an event of its own.
        end = OPEN if piece.ending is None else TEXT_SENT
        self._places[piece.choice] = f"{piece.count}{end}"
        token_ids = piece.token_ids if self._with_ids else None
        if piece.text or token_ids or piece.logprobs:
            delta = Delta(
                choice=piece.choice,
                text=piece.text,
                token_ids=token_ids,
                logprobs=self._entries(piece.logprobs),
            )
            yield ChatEvent(event_id=self._place(), delta=delta)
        if piece.ending is not None:
            ending = piece.ending
            finished = Finished(choice=piece.choice, reason=ending.reason, stop=ending.stop)
            stop = stop_reason(ending, self._answer.silent_ends)
            if isinstance(stop, int):
                finished.stop_token_id = stop
            self._places[piece.choice] = f"{piece.count}{FINISH_SENT}"
            yield ChatEvent(event_id=self._place(), finished=finished)

    def usage(self) -> ChatEvent:
        answer = self._answer
        usage = Usage(
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
        )
        return ChatEvent(event_id=self._place(), usage=usage)

    def _prompt(self, k: int) -> Iterator[TokenLogprob]:
        answer = self._answer
        assert answer.prompt_scores is not None and answer.prompt_ids is not None
        scores = ((own, top[:k]) for own, top in answer.prompt_scores)
        text = answer.head.reply.prompt_text
        return prompt_entries(answer.table, answer.prompt_ids, text, scores)

    async def _slices_of_prompt(self, k: int) -> AsyncIterator[list[chat_pb2.TokenLogprob]]:
        """The prompt's tokens with `k` top ones each, as many of them as an event has."""
        tokens = self._prompt(k)
        for _ in range(_events_of_prompt(self._answer.prompt_tokens, k)):
            found: list[chat_pb2.TokenLogprob] = []
            left = _tokens_of_event(k)
            while left > 0:
                await self._answer.slices.turn()
                size = min(left, max(1, _SLICE_VALUES // (1 + k)))
                some = list(islice(tokens, size))
                found += self._entries(some)
                left = left - size if some else 0
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
                        token_id=token, token=_piece(self._shown, token), logprob=value
                    )
                    for token, value in entry.top
                ],
            )
            for entry in entries
        ]

    def _place(self) -> str:
        return f"{self._rid}/{'.'.join(self._places)}"


def _tokens_of_event(k: int) -> int:
    return max(1, _EVENT_VALUES // (1 + k))


def _events_of_prompt(tokens: int, k: int) -> int:
    return max(1, -(-tokens // _tokens_of_event(k)))


def _piece(pieces: Sequence[bytes], token: int) -> bytes:
    return pieces[token] if 0 <= token < len(pieces) else b""
