"""How a request for tokens is answered, whatever its API: admission, its answer, and what its headers ask for."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from services.gateway.admission.admission import Admission
from services.gateway.admission.answer_limits import AnswerLimits
from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.request_options import (
    RequestOptions,
    Timeouts,
    json_fingerprint,
    read_request_options,
)
from services.gateway.decoding.decode import decode, off_loop
from services.gateway.following.answer import Answer
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.media.data_urls import DecodedBody, InlineMedia
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.sampling.bad_words import BAD_WORDS_TIMES
from services.gateway.reading.valid_request import ValidRequest
from services.gateway.telemetry.metrics.metrics import Metrics
from shared.errors import InvalidRequest, ServingError
from shared.queue.keys import model_tag, new_request_id

_B = TypeVar("_B", bound=msgspec.Struct)

# A body's bytes as requests, and what it asks for beside its answer.
Reader = Callable[[Exchange, bytes], tuple[list[ValidRequest], RequestOptions]]

# Finds what a body refers to.
LookUp = Callable[[bytes], Awaitable[None]]

# Writes one reply to answers, streamed or not; with ids its events can be resumed from.
Write = Callable[[Exchange, Sequence[Answer], bool, bool], Awaitable[None]]


class Generating:
    """What the handlers that generate share. An API gives it how it reads bodies and writes replies."""

    def __init__(
        self,
        model: ServedModel,
        admission: Admission,
        metrics: Metrics,
        body_limits: BodyLimits,
        answer_limits: AnswerLimits,
        timeouts: Timeouts,
    ) -> None:
        """`timeouts` are the server's own."""
        self.model = model
        self._admission = admission
        self._metrics = metrics
        self._body_limits = body_limits
        self._answer_limits = answer_limits
        self._timeouts = timeouts

    def read_options(
        self, exchange: Exchange, body: DecodedBody[GenerationOptions]
    ) -> RequestOptions:
        """What headers and body ask for beside the answer. Raises InvalidRequest naming the header or field."""
        fingerprint = partial(json_fingerprint, body.json, exchange.path, body.media)
        options = read_request_options(exchange.header, body.content, self._timeouts, fingerprint)
        if options.last_event_id and not body.content.stream:
            name = "Last-Event-ID"
            raise InvalidRequest("INVALID_HEADER", f"{name} is for streams", field=name)
        return options

    def reader(
        self,
        kind: type[_B],
        read: Callable[[_B, ServedModel], tuple[ValidRequest, GenerationOptions]],
    ) -> Reader:
        """How bodies of a kind are read that have one prompt and whose media stay in them."""

        def of_body(exchange: Exchange, body: bytes) -> tuple[list[ValidRequest], RequestOptions]:
            request, options = read(decode(body, kind), self.model)
            found = DecodedBody(options, body, InlineMedia())
            return [request], self.read_options(exchange, found)

        return of_body

    async def answer(
        self,
        exchange: Exchange,
        caller: Caller,
        read: Reader,
        write: Write,
        times: int = 1,
        more_kinds: Collection[str] = (),
        look_up: LookUp | None = None,
    ) -> None:
        """Answers one body, whose values may be read so many times; `more_kinds`: its media types beside JSON;
        `look_up` is called before it is read. Raises ServingError for what is not accepted; what was accepted ends
        when the client leaves or has its whole reply.
        """
        try:
            body = await exchange.json_body(self._body_limits, more_kinds)
            if look_up is not None:
                await look_up(body)
            # A large body is read in a thread, and one with words that have to be tokenized.
            if b'"bad_words"' in body:
                times *= BAD_WORDS_TIMES
            requests, options = await off_loop(partial(read, exchange), body, times)
            del body
            exchange.tenant = tenant_of(caller, requests[0].user)
            stream = requests[0].stream
            held = 0 if stream else self._answer_limits.take(requests, self.model)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise
        try:
            async with exchange.while_connected():
                answers = await self._accept(requests, caller, options)
                # What was sent is in the queue and at preprocess: the answer may take long.
                requests.clear()
                exchange.release_body()
                exchange.accepted = True
                exchange.request_id = answers[0].head.request_id
                try:
                    await write(exchange, answers, stream, options.event_ids)
                finally:
                    for answer in answers:
                        if not answer.outlives_exchange:
                            answer.close()
        finally:
            self._answer_limits.give_back(held)

    async def _accept(
        self, requests: Sequence[ValidRequest], caller: Caller, options: RequestOptions
    ) -> list[Answer]:
        """Each of several prompts is a request of its own."""
        if len(requests) == 1:
            return [await self._admission.accept(requests[0], caller, options)]
        tag = model_tag(self.model.name)
        callers = [caller]
        callers += [replace(caller, request_id=new_request_id(tag)) for _ in requests[1:]]
        return await self._admission.accept_all(requests, callers, options)
