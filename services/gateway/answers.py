"""POST /v1/chat/completions and /v1/completions: from the body to the last event."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from services.gateway.admission import Admission
from services.gateway.caller import Caller
from services.gateway.data_urls import Luggage, read_json
from services.gateway.http import Exchange
from services.gateway.metrics import Metrics
from services.gateway.model import ServedModel
from services.gateway.openai_requests import read_chat, read_completions
from services.gateway.request import ValidRequest
from services.gateway.terms import Terms, Timeouts, read_terms
from services.gateway.writing import write_stream, write_streams, write_whole, write_wholes
from shared.errors import InvalidRequest, ServingError
from shared.keys import model_tag, new_request_id

Reader = Callable[[Mapping[str, Any], ServedModel], Sequence[ValidRequest]]


class Answers:
    """The handlers that generate."""

    def __init__(
        self,
        model: ServedModel,
        admission: Admission,
        metrics: Metrics,
        max_body_bytes: int,
        timeouts: Timeouts,
    ) -> None:
        """`timeouts` are the server's own."""
        self._model = model
        self._admission = admission
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._timeouts = timeouts

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/chat/completions."""
        await self._answer(exchange, caller, lambda content, model: [read_chat(content, model)])

    async def completion(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/completions."""
        await self._answer(exchange, caller, read_completions)

    async def _answer(self, exchange: Exchange, caller: Caller, read: Reader) -> None:
        try:
            content, luggage = read_json(await exchange.json_body(self._max_body_bytes))
            requests = [replace(r, luggage=luggage) for r in read(content, self._model)]
            terms = await self._terms(exchange, content, luggage)
            if terms.last_event_id and not requests[0].stream:
                name = "Last-Event-ID"
                raise InvalidRequest("INVALID_HEADER", f"{name} is for streams", field=name)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise
        async with exchange.while_connected():
            if len(requests) > 1:
                await self._answer_all(exchange, caller, requests, terms)
                return
            answer = await self._admission.accept(requests[0], caller, terms)
            exchange.request_id = answer.head.request_id
            try:
                if requests[0].stream:
                    await write_stream(exchange, answer, with_ids=terms.event_ids)
                else:
                    await write_whole(exchange, answer)
            finally:
                answer.close()

    async def _terms(
        self, exchange: Exchange, content: Mapping[str, Any], luggage: Luggage
    ) -> Terms:
        read = partial(read_terms, exchange.header, content, self._timeouts, exchange.path, luggage)
        # Under a key all of the body is hashed: a millisecond for each megabyte.
        return await asyncio.to_thread(read) if luggage.is_heavy else read()

    async def _answer_all(
        self,
        exchange: Exchange,
        caller: Caller,
        requests: Sequence[ValidRequest],
        terms: Terms,
    ) -> None:
        """One reply to several prompts, each of which is a request of its own."""
        tag = model_tag(self._model.name)
        callers = [caller]
        callers += [replace(caller, request_id=new_request_id(tag)) for _ in requests[1:]]
        answers = await self._admission.accept_all(requests, callers, terms)
        exchange.request_id = answers[0].head.request_id
        try:
            if requests[0].stream:
                await write_streams(exchange, answers, with_ids=terms.event_ids)
            else:
                await write_wholes(exchange, answers)
        finally:
            for answer in answers:
                answer.close()
