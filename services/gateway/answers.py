"""POST /v1/chat/completions and /v1/completions: from the body to the last event."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.gateway.admission import Admission, Caller
from services.gateway.answer import Answer, Piece
from services.gateway.http import Exchange
from services.gateway.metrics import Metrics
from services.gateway.model import ServedModel
from services.gateway.openai_replies import (
    DONE,
    HEARTBEAT,
    EventWriter,
    event_writers,
    whole_body,
    whole_body_of_all,
)
from services.gateway.openai_requests import parse_body, read_chat, read_completions
from services.gateway.request import ValidRequest
from shared import tasks
from shared.errors import ServingError
from shared.keys import model_tag, new_request_id

Reader = Callable[[Mapping[str, Any], ServedModel], Sequence[ValidRequest]]


class Answers:
    """The handlers that generate."""

    def __init__(
        self, model: ServedModel, admission: Admission, metrics: Metrics, max_body_bytes: int
    ) -> None:
        self._model = model
        self._admission = admission
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/chat/completions."""
        await self._answer(exchange, caller, lambda content, model: [read_chat(content, model)])

    async def completion(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/completions."""
        await self._answer(exchange, caller, read_completions)

    async def _answer(self, exchange: Exchange, caller: Caller, read: Reader) -> None:
        try:
            content = parse_body(await exchange.json_body(self._max_body_bytes))
            requests = read(content, self._model)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise
        async with exchange.while_connected():
            if len(requests) > 1:
                await self._answer_all(exchange, caller, requests)
                return
            answer = await self._admission.accept(requests[0], caller)
            try:
                await (write_stream if requests[0].stream else write_whole)(exchange, answer)
            finally:
                answer.close()

    async def _answer_all(
        self, exchange: Exchange, caller: Caller, requests: Sequence[ValidRequest]
    ) -> None:
        """One reply to several prompts, each of which is a request of its own."""
        tag = model_tag(self._model.name)
        callers = [caller]
        callers += [replace(caller, request_id=new_request_id(tag)) for _ in requests[1:]]
        answers = await self._admission.accept_all(requests, callers)
        try:
            await (write_streams if requests[0].stream else write_wholes)(exchange, answers)
        finally:
            for answer in answers:
                answer.close()


async def write_stream(exchange: Exchange, answer: Answer) -> None:
    """Server-sent events until `[DONE]`. Accepted requests only: the head of the response goes out
    first.
    """
    writer = EventWriter(answer)
    await exchange.start_stream()
    begun = answer.prompt_scores is not None
    await exchange.write((begun and writer.first()) or HEARTBEAT)
    while True:
        pieces = await answer.next()
        chunk = b""
        if not begun and answer.prompt_scores is not None:
            begun, chunk = True, writer.first()
        chunk += b"".join([writer.piece(piece) for piece in pieces])
        if answer.ended:
            answer.close()
            await exchange.end_stream(chunk + writer.usage() + DONE)
            return
        if chunk or not pieces:
            await exchange.write(chunk or HEARTBEAT)


async def write_streams(exchange: Exchange, answers: Sequence[Answer]) -> None:
    """The events of several prompts as they come, until `[DONE]`. If one fails, all end with its
    error.
    """
    writers = event_writers(answers)
    await exchange.start_stream()
    await exchange.write(HEARTBEAT)

    async def write(answer: Answer, writer: EventWriter) -> None:
        begun = answer.prompt_scores is not None
        chunk = writer.first() if begun else b""
        while not answer.ended:
            if chunk:
                await exchange.write(chunk)
            pieces = await answer.next()
            chunk = b"" if pieces else HEARTBEAT
            if not begun and answer.prompt_scores is not None:
                begun, chunk = True, writer.first()
            chunk += b"".join([writer.piece(piece) for piece in pieces])
        answer.close()
        await exchange.write(chunk)

    await tasks.together(map(write, answers, writers))
    await exchange.end_stream(writers[0].usage() + DONE)


async def write_whole(exchange: Exchange, answer: Answer) -> None:
    """One JSON body at the end."""
    pieces = await _all_pieces(answer)
    await exchange.respond(200, whole_body(answer, pieces))


async def write_wholes(exchange: Exchange, answers: Sequence[Answer]) -> None:
    """One JSON body for several prompts."""
    found = await tasks.together(map(_all_pieces, answers))
    await exchange.respond(200, whole_body_of_all(answers, found))


async def _all_pieces(answer: Answer) -> list[Piece]:
    pieces: list[Piece] = []
    while not answer.ended:
        pieces += await answer.next()
    answer.close()
    return pieces
