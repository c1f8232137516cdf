"""Anthropic's routes."""

from collections.abc import Sequence

from services.gateway.admission.api_keys import BEARER, KeyHeader
from services.gateway.admission.caller import Caller
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.anthropic.count_tokens import CountTokens
from services.gateway.api.anthropic.errors import error_reply
from services.gateway.api.anthropic.replies import ID_PREFIX, MessageWriter, whole
from services.gateway.api.anthropic.requests import read_message
from services.gateway.api.anthropic.schema import CountBody, MessagesBody, TokenCount
from services.gateway.api.anthropic.version import check_version
from services.gateway.api.generating import Generating
from services.gateway.api.parts import Api, Parts
from services.gateway.decoding.decode import decode
from services.gateway.following.answer import Answer
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from services.gateway.http.streams import write_stream
from services.gateway.reading.data_urls import DecodedBody, InlineMedia
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import ServingError
from tessera.scheduler.v1.queue_pb2 import ReplyKind


class AnthropicEndpoint:
    """POST /v1/messages and /v1/messages/count_tokens."""

    roots = ("/v1/messages",)
    key_headers = (KeyHeader("X-Api-Key"), BEARER)

    def __init__(self, generating: Generating, counting: CountTokens) -> None:
        self._generating = generating
        path = "/v1/messages"
        self.routes: Sequence[Route] = (
            Route("POST", path, self._answer, MessagesBody, generates=True),
            Route("POST", f"{path}/count_tokens", counting.count, CountBody, TokenCount),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"type": "error", "error": {"type", "message"}}."""
        return error_reply(error)

    async def _answer(self, exchange: Exchange, caller: Caller) -> None:
        check_version(exchange)
        await self._generating.answer(exchange, caller, self._read, _write)

    def _read(self, exchange: Exchange, body: bytes) -> tuple[list[ValidRequest], RequestOptions]:
        request, options = read_message(decode(body, MessagesBody), self._generating.model)
        decoded = DecodedBody(options, body, InlineMedia())
        return [request], self._generating.read_options(exchange, decoded)


async def _write(
    exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
) -> None:
    [answer] = answers
    if stream:
        await write_stream(exchange, answers, [MessageWriter(answer, with_ids)])
        return
    [outcome] = await answer.whole()
    await exchange.respond_in_pieces(answer.slices.joined(whole(answer, outcome)))


def _endpoint(parts: Parts) -> AnthropicEndpoint:
    return AnthropicEndpoint(
        parts.generating, CountTokens(parts.model, parts.pool, parts.body_limits)
    )


ANTHROPIC = Api(_endpoint, {ReplyKind.REPLY_KIND_ANTHROPIC: ReplyForm(MessageWriter, ID_PREFIX)})
