"""TGI's routes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from services.gateway.admission.api_keys import BEARER
from services.gateway.admission.caller import Caller
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.generating import Generating
from services.gateway.api.one_answer import written_by
from services.gateway.api.parts import Api, Parts
from services.gateway.api.tgi.errors import error_reply
from services.gateway.api.tgi.replies import TokenWriter, whole
from services.gateway.api.tgi.requests import generation_options, read_generate, urls
from services.gateway.api.tgi.schema import GenerateRequest, InfoReply
from services.gateway.following.answer import Answer, Outcome
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.media.data_urls import DecodedBody, decode_with_media
from services.gateway.reading.sampling.sampling import MOST_STOPS
from services.gateway.reading.valid_request import ValidRequest
from services.gateway.release import release
from shared.errors import ServingError
from tessera.scheduler.v1.queue_pb2 import ReplyKind


class TgiEndpoint:
    """POST /, /generate, /generate_stream, and GET /info."""

    roots = ("/generate", "/generate_stream", "/info")
    key_headers = (BEARER,)

    def __init__(self, generating: Generating) -> None:
        self._generating = generating
        body = GenerateRequest
        self.routes: Sequence[Route] = (
            Route("POST", "/", self._any, body, generates=True),
            Route("POST", "/generate", self._whole, body, generates=True, known_by="inputs"),
            Route("POST", "/generate_stream", self._stream, body, generates=True),
            Route("GET", "/info", self._info, reply=InfoReply),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"error", "error_type"}."""
        return error_reply(error)

    async def _any(self, exchange: Exchange, caller: Caller) -> None:
        await self._answer(exchange, caller, None)

    async def _whole(self, exchange: Exchange, caller: Caller) -> None:
        await self._answer(exchange, caller, False)

    async def _stream(self, exchange: Exchange, caller: Caller) -> None:
        await self._answer(exchange, caller, True)

    async def _info(self, exchange: Exchange, caller: Caller) -> None:
        await exchange.reply(_info(self._generating.model))

    async def _answer(self, exchange: Exchange, caller: Caller, stream: bool | None) -> None:
        """`stream`: as the route has it; None is as the body has it, and a whole reply is in a list then."""
        read = partial(self._read, stream=stream)
        write = _WRITE_IN_LIST if stream is None else _WRITE
        await self._generating.answer(exchange, caller, read, write)

    def _read(
        self, exchange: Exchange, body: bytes, stream: bool | None
    ) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = decode_with_media(body, GenerateRequest, urls)
        streams = decoded.content.stream is True if stream is None else stream
        request = read_generate(decoded.content, streams, self._generating.model)
        options = DecodedBody(
            generation_options(decoded.content, streams), decoded.json, decoded.media
        )
        found = self._generating.read_options(exchange, options)
        return [replace(request, inline_media=decoded.media)], found


def _in_list(answer: Answer, outcome: Outcome) -> Iterator[str]:
    yield "["
    yield from whole(answer, outcome)
    yield "]"


_WRITE = written_by(TokenWriter, whole)
_WRITE_IN_LIST = written_by(TokenWriter, _in_list)


def _info(model: ServedModel) -> InfoReply:
    return InfoReply(
        model_id=model.name,
        model_pipeline_tag="image-text-to-text" if model.has_vision else "text-generation",
        max_best_of=model.max_choices,
        max_stop_sequences=MOST_STOPS,
        max_input_tokens=model.max_model_len - 1,
        max_total_tokens=model.max_model_len,
        version=release(),
    )


def _endpoint(parts: Parts) -> TgiEndpoint:
    return TgiEndpoint(parts.generating)


TGI = Api(_endpoint, {ReplyKind.REPLY_KIND_TGI: ReplyForm(TokenWriter)})
