"""POST /v1/chat/completions and /v1/completions: from the body to the last event."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from services.gateway.admission.admission import Admission
from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.model import ServedModel
from services.gateway.admission.request import ValidRequest
from services.gateway.admission.request_options import Terms, Timeouts, read_terms
from services.gateway.api.openai.requests import read_chat, read_completions
from services.gateway.following.answer import Answer
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.http.sse import write_stream, write_streams, write_whole, write_wholes
from services.gateway.reading.data_urls import read_json
from services.gateway.reading.fields import off_the_loop
from services.gateway.telemetry.metrics import Metrics
from shared.errors import InvalidRequest, ServingError
from shared.queue.keys import model_tag, new_request_id

Reader = Callable[[Mapping[str, Any], ServedModel], Sequence[ValidRequest]]


class Answers:
    """The handlers that generate."""

    def __init__(
        self,
        model: ServedModel,
        admission: Admission,
        metrics: Metrics,
        body_limits: BodyLimits,
        timeouts: Timeouts,
    ) -> None:
        """`timeouts` are the server's own."""
        self._model = model
        self._admission = admission
        self._metrics = metrics
        self._body_limits = body_limits
        self._timeouts = timeouts

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/chat/completions."""
        await self._answer(exchange, caller, lambda content, model: [read_chat(content, model)])

    async def completion(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/completions."""
        await self._answer(exchange, caller, read_completions)

    async def _answer(self, exchange: Exchange, caller: Caller, read: Reader) -> None:
        try:
            understand = partial(self._understand, exchange, read)
            requests, terms = await off_the_loop(
                understand, await exchange.json_body(self._body_limits)
            )
            exchange.tenant = tenant_of(caller, requests[0].user)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise
        async with exchange.while_connected():
            stream = requests[0].stream
            answers = await self._accept(requests, caller, terms)
            # What was sent is in the queue and at preprocess: the answer may take long.
            requests.clear()
            exchange.release_body()
            exchange.accepted = True
            exchange.request_id = answers[0].head.request_id
            try:
                await _write(exchange, answers, terms, stream=stream)
            finally:
                for answer in answers:
                    answer.close()

    def _understand(
        self, exchange: Exchange, read: Reader, body: bytes
    ) -> tuple[list[ValidRequest], Terms]:
        """A body as requests. In a thread where it is large."""
        content, luggage = read_json(body)
        requests = [replace(r, luggage=luggage) for r in read(content, self._model)]
        terms = read_terms(exchange.header, content, self._timeouts, exchange.path, luggage)
        if terms.last_event_id and not requests[0].stream:
            name = "Last-Event-ID"
            raise InvalidRequest("INVALID_HEADER", f"{name} is for streams", field=name)
        return requests, terms

    async def _accept(
        self, requests: Sequence[ValidRequest], caller: Caller, terms: Terms
    ) -> list[Answer]:
        """Each of several prompts is a request of its own."""
        if len(requests) == 1:
            return [await self._admission.accept(requests[0], caller, terms)]
        tag = model_tag(self._model.name)
        callers = [caller]
        callers += [replace(caller, request_id=new_request_id(tag)) for _ in requests[1:]]
        return await self._admission.accept_all(requests, callers, terms)


async def _write(
    exchange: Exchange, answers: Sequence[Answer], terms: Terms, *, stream: bool
) -> None:
    """One reply, to one prompt or to several."""
    if len(answers) > 1:
        if stream:
            await write_streams(exchange, answers, with_ids=terms.event_ids)
        else:
            await write_wholes(exchange, answers)
    elif stream:
        await write_stream(exchange, answers[0], with_ids=terms.event_ids)
    else:
        await write_whole(exchange, answers[0])
