"""POST /v1/chat/completions and /v1/completions: from the body to the last event."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from services.gateway.admission.admission import Admission
from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.model import ServedModel
from services.gateway.admission.request import ValidRequest
from services.gateway.admission.request_options import (
    RequestOptions,
    Timeouts,
    json_fingerprint,
    read_request_options,
)
from services.gateway.api.openai.replies import reply_writers, whole_of_all
from services.gateway.api.openai.requests import media_urls, read_chat, read_completions
from services.gateway.api.openai.schema import ChatRequest, CompletionRequest
from services.gateway.following.answer import Answer
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.http.sse import all_pieces, write_stream
from services.gateway.reading.data_urls import DecodedBody, InlineMedia, decode_with_media
from services.gateway.reading.decode import decode, off_loop
from services.gateway.reading.options import GenerationOptions
from services.gateway.telemetry.metrics import Metrics
from shared.errors import InvalidRequest, ServingError
from shared.queue.keys import model_tag, new_request_id

# A body's bytes as requests, and what it asks for beside its answer.
Reader = Callable[[Exchange, bytes], tuple[list[ValidRequest], RequestOptions]]


class Completions:
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
        await self._answer(exchange, caller, self._read_chat)

    async def completion(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/completions."""
        await self._answer(exchange, caller, self._read_completions)

    def _read_chat(
        self, exchange: Exchange, body: bytes
    ) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = decode_with_media(body, ChatRequest, media_urls)
        request = replace(read_chat(decoded.content, self._model), inline_media=decoded.media)
        return [request], self._read_options(exchange, decoded)

    def _read_completions(
        self, exchange: Exchange, body: bytes
    ) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = DecodedBody(decode(body, CompletionRequest), body, InlineMedia())
        requests = read_completions(decoded.content, self._model)
        return requests, self._read_options(exchange, decoded)

    def _read_options(
        self, exchange: Exchange, body: DecodedBody[GenerationOptions]
    ) -> RequestOptions:
        fingerprint = partial(json_fingerprint, body.json, exchange.path, body.media)
        options = read_request_options(exchange.header, body.content, self._timeouts, fingerprint)
        if options.last_event_id and not body.content.stream:
            name = "Last-Event-ID"
            raise InvalidRequest("INVALID_HEADER", f"{name} is for streams", field=name)
        return options

    async def _answer(self, exchange: Exchange, caller: Caller, read: Reader) -> None:
        try:
            body = await exchange.json_body(self._body_limits)
            # A large body is read in a thread.
            requests, options = await off_loop(partial(read, exchange), body)
            del body
            exchange.tenant = tenant_of(caller, requests[0].user)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise
        async with exchange.while_connected():
            stream = requests[0].stream
            answers = await self._accept(requests, caller, options)
            # What was sent is in the queue and at preprocess: the answer may take long.
            requests.clear()
            exchange.release_body()
            exchange.accepted = True
            exchange.request_id = answers[0].head.request_id
            try:
                await _write(exchange, answers, stream=stream, with_ids=options.event_ids)
            finally:
                for answer in answers:
                    answer.close()

    async def _accept(
        self, requests: Sequence[ValidRequest], caller: Caller, options: RequestOptions
    ) -> list[Answer]:
        """Each of several prompts is a request of its own."""
        if len(requests) == 1:
            return [await self._admission.accept(requests[0], caller, options)]
        tag = model_tag(self._model.name)
        callers = [caller]
        callers += [replace(caller, request_id=new_request_id(tag)) for _ in requests[1:]]
        return await self._admission.accept_all(requests, callers, options)


async def _write(
    exchange: Exchange, answers: Sequence[Answer], *, stream: bool, with_ids: bool
) -> None:
    """One reply, to one prompt or to several."""
    writers = reply_writers(answers, with_ids)
    if stream:
        await write_stream(exchange, answers, writers, with_ids=with_ids)
        return
    pieces = await all_pieces(answers)
    several = len(answers) > 1
    await exchange.respond(
        200, whole_of_all(answers, pieces) if several else writers[0].whole(pieces[0])
    )
