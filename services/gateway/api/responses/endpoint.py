"""The routes of the Responses API."""

from collections.abc import Sequence
from dataclasses import replace

from services.gateway.admission.api_keys import BEARER
from services.gateway.admission.caller import Caller
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.generating import Generating
from services.gateway.api.parts import Api, Parts
from services.gateway.api.responses.errors import error_reply
from services.gateway.api.responses.events import ResponseWriter
from services.gateway.api.responses.requests import media_urls, read_response
from services.gateway.api.responses.response import ID_PREFIX, whole_response, written
from services.gateway.api.responses.schema import ResponseBody
from services.gateway.following.answer import Answer
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from services.gateway.http.streams import write_stream
from services.gateway.reading.data_urls import DecodedBody, decode_with_media
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import ServingError
from tessera.scheduler.v1.queue_pb2 import ReplyKind


class ResponsesEndpoint:
    """/v1/responses, and what lies below it."""

    roots = ("/v1/responses",)
    key_headers = (BEARER,)

    def __init__(self, generating: Generating) -> None:
        self._generating = generating
        self.routes: Sequence[Route] = (
            Route("POST", "/v1/responses", self._answer, ResponseBody, generates=True),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"error": {"message", "type", "param", "code"}}."""
        return error_reply(error)

    async def _answer(self, exchange: Exchange, caller: Caller) -> None:
        await self._generating.answer(exchange, caller, self._read, _write)

    def _read(self, exchange: Exchange, body: bytes) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = decode_with_media(body, ResponseBody, media_urls)
        request, options = read_response(decoded.content, self._generating.model)
        request = replace(request, inline_media=decoded.media)
        asked = DecodedBody(options, decoded.json, decoded.media)
        return [request], self._generating.read_options(exchange, asked)


async def _write(
    exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
) -> None:
    [answer] = answers
    if stream:
        await write_stream(exchange, answers, [ResponseWriter(answer, with_ids)])
        return
    [outcome] = await answer.whole()
    response = whole_response(answer, outcome)
    await exchange.respond_in_pieces(answer.slices.joined(written(response)))


def _endpoint(parts: Parts) -> ResponsesEndpoint:
    return ResponsesEndpoint(parts.generating)


RESPONSES = Api(_endpoint, {ReplyKind.REPLY_KIND_RESPONSE: ReplyForm(ResponseWriter, ID_PREFIX)})
