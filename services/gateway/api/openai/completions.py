"""POST /v1/chat/completions and /v1/completions: from the body to the last event."""

from collections.abc import Sequence
from dataclasses import replace

from services.gateway.admission.caller import Caller
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.generating import Generating
from services.gateway.api.openai.message_replies import reply_writers
from services.gateway.api.openai.requests import (
    completion_media_urls,
    media_urls,
    read_chat,
    read_completions,
)
from services.gateway.api.openai.schema import ChatRequest, CompletionRequest
from services.gateway.api.openai.whole import whole
from services.gateway.following.answer import Answer
from services.gateway.http.exchange import Exchange
from services.gateway.http.streams import write_stream
from services.gateway.reading.media.data_urls import decode_with_media
from services.gateway.reading.valid_request import ValidRequest
from shared.net import tasks

# Each prompt is read with all lists of the body: a small one may have so many that this takes long.
_READ_TIMES = 16


class Completions:
    """The handlers that generate."""

    def __init__(self, generating: Generating) -> None:
        self._generating = generating

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/chat/completions."""
        await self._generating.answer(exchange, caller, self._read_chat, _write)

    async def completion(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/completions."""
        await self._generating.answer(exchange, caller, self._read_completions, _write, _READ_TIMES)

    def _read_chat(
        self, exchange: Exchange, body: bytes
    ) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = decode_with_media(body, ChatRequest, media_urls)
        request = read_chat(decoded.content, self._generating.model)
        request = replace(request, inline_media=decoded.media)
        return [request], self._generating.read_options(exchange, decoded)

    def _read_completions(
        self, exchange: Exchange, body: bytes
    ) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = decode_with_media(body, CompletionRequest, completion_media_urls)
        requests = read_completions(decoded.content, self._generating.model)
        if decoded.media.pieces:  # they are those of the one prompt
            requests = [replace(request, inline_media=decoded.media) for request in requests]
        return requests, self._generating.read_options(exchange, decoded)


async def _write(
    exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
) -> None:
    """One reply, to one prompt or to several."""
    if stream:
        await write_stream(exchange, answers, reply_writers(answers, with_ids))
        return
    outcomes = await tasks.together(answer.whole() for answer in answers)
    await exchange.respond_in_pieces(answers[0].slices.joined(whole(answers, outcomes)))
