"""POST /v1/chat/completions and /v1/completions: from the body to the last event."""

from collections.abc import Callable, Mapping
from typing import Any

from services.gateway.admission import Admission, Caller
from services.gateway.answer import Answer, Piece
from services.gateway.http import Exchange
from services.gateway.metrics import Metrics
from services.gateway.model import ServedModel
from services.gateway.openai_replies import DONE, HEARTBEAT, EventWriter, whole_body
from services.gateway.openai_requests import parse_body, read_chat, read_completion
from services.gateway.request import ValidRequest
from shared.errors import ServingError

Reader = Callable[[Mapping[str, Any], ServedModel], ValidRequest]


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
        await self._answer(exchange, caller, read_chat)

    async def completion(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/completions."""
        await self._answer(exchange, caller, read_completion)

    async def _answer(self, exchange: Exchange, caller: Caller, read: Reader) -> None:
        try:
            request = read(parse_body(await exchange.json_body(self._max_body_bytes)), self._model)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise
        async with exchange.while_connected():
            answer = await self._admission.accept(request, caller)
            try:
                await (write_stream if request.stream else write_whole)(exchange, answer)
            finally:
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


async def write_whole(exchange: Exchange, answer: Answer) -> None:
    """One JSON body at the end."""
    pieces: list[Piece] = []
    while not answer.ended:
        pieces += await answer.next()
    answer.close()
    await exchange.respond(200, whole_body(answer, pieces))
