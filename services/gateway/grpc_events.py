"""The events of the gRPC door."""

from collections.abc import AsyncIterator, Iterable, Sequence

from services.gateway.answer import Answer, Piece
from services.gateway.logprobs import TokenLogprob, prompt_entries
from services.gateway.openai_usage import stop_reason
from tessera.gateway.v1 import chat_pb2
from tessera.gateway.v1.chat_pb2 import ChatEvent, Delta, Finished, PromptLogprobs, Usage


async def events(answer: Answer) -> AsyncIterator[ChatEvent]:
    """All events of one answer; closes it before the last."""
    writer = _EventWriter(answer)
    yield writer.accepted()
    begun = False
    while not answer.ended:
        # Nothing on silence: keepalive pings hold the connection.
        pieces = await answer.next() if begun or answer.prompt_scores is None else []
        if not begun and answer.prompt_scores is not None:
            begun = True
            for event in writer.prompt():
                yield event
        for piece in pieces:
            for event in writer.piece(piece):
                yield event
    answer.close()
    yield writer.usage()


class _EventWriter:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._places = ["0"] * answer.head.sampling.n
        reply = answer.head.reply
        self._with_ids = reply.return_token_ids
        table = answer.table
        self._shown = table.shown_pieces if reply.skip_special_tokens else table.pieces

    def accepted(self) -> ChatEvent:
        answer = self._answer
        shown = answer.prompt_ids if self._with_ids else None
        accepted = chat_pb2.Accepted(
            request_id=answer.head.request_id,
            model=answer.head.model,
            prompt_tokens=answer.prompt_tokens,
            prompt_token_ids=shown,
        )
        return ChatEvent(event_id=self._place(), accepted=accepted)

    def prompt(self) -> Iterable[ChatEvent]:
        """What is told of the prompt, once its scores are known."""
        reply, sampling = self._answer.head.reply, self._answer.head.sampling
        if reply.HasField("prompt_logprobs"):
            told = PromptLogprobs(tokens=self._entries(self._prompt(reply.prompt_logprobs)))
            yield ChatEvent(event_id=self._place(), prompt_logprobs=told)
        if reply.echo:
            asked = sampling.HasField("logprobs")
            logprobs = self._entries(self._prompt(sampling.logprobs)) if asked else None
            for choice in range(sampling.n):
                delta = Delta(choice=choice, text=reply.prompt_text, logprobs=logprobs)
                yield ChatEvent(event_id=self._place(), delta=delta)

    def piece(self, piece: Piece) -> Iterable[ChatEvent]:
        """A delta if there is something to tell, and the end of the choice."""
        self._places[piece.choice] = f"{piece.count}{'' if piece.ending is None else 'e'}"
        # Text that an ending sets free has no event id of its own: it goes out under that of the
        # ending.
        place = self._place()
        token_ids = piece.token_ids if self._with_ids else None
        if piece.text or token_ids or piece.logprobs:
            delta = Delta(
                choice=piece.choice,
                text=piece.text,
                token_ids=token_ids,
                logprobs=self._entries(piece.logprobs),
            )
            yield ChatEvent(event_id=place, delta=delta)
        if piece.ending is not None:
            ending = piece.ending
            finished = Finished(choice=piece.choice, reason=ending.reason, stop=ending.stop)
            stop = stop_reason(ending, self._answer.eos_token_ids)
            if isinstance(stop, int):
                finished.stop_token_id = stop
            yield ChatEvent(event_id=place, finished=finished)

    def usage(self) -> ChatEvent:
        answer = self._answer
        usage = Usage(
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
        )
        return ChatEvent(event_id=self._place(), usage=usage)

    def _prompt(self, k: int) -> list[TokenLogprob]:
        answer = self._answer
        assert answer.prompt_scores is not None and answer.prompt_ids is not None
        scores = [(own, top[:k]) for own, top in answer.prompt_scores]
        text = answer.head.reply.prompt_text
        return prompt_entries(answer.table, answer.prompt_ids, text, scores)

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
        return f"{self._answer.head.request_id}/{'.'.join(self._places)}"


def _piece(pieces: Sequence[bytes], token: int) -> bytes:
    return pieces[token] if 0 <= token < len(pieces) else b""
