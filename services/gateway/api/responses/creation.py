"""POST /v1/responses: from a body to its reply, with what is kept of it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.compact_json import compact
from services.gateway.api.generating import Generating
from services.gateway.api.responses.events import ResponseWriter, ended_response
from services.gateway.api.responses.kept import KeptResponses
from services.gateway.api.responses.references import merge_resolved, refers, resolved
from services.gateway.api.responses.requests import media_urls, read_response
from services.gateway.api.responses.response import (
    QUEUED,
    response_object,
    written,
)
from services.gateway.api.responses.schema import Item, KeptFields, KeptOutput, ResponseBody
from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.decode import decode, in_thread, is_large, off_loop
from services.gateway.decoding.typed import decoder_of
from services.gateway.following.answer import Answer
from services.gateway.http.exchange import Exchange
from services.gateway.http.streams import write_stream
from services.gateway.reading.media.data_urls import DecodedBody, decode_with_media
from services.gateway.reading.valid_request import ValidRequest


class Creation:
    """One request for a response."""

    def __init__(self, generating: Generating, kept: KeptResponses, caller: Caller) -> None:
        self._generating = generating
        self._kept = kept
        self._caller = caller
        self._previous = ""
        self._input = b""
        self._earlier: Sequence[Item] = ()
        # The input with items in the places of their names, where it has some.
        self._resolved = b""
        self._is_kept = self._is_background = False

    async def look_up(self, body: bytes) -> None:
        """Finds the conversation that it goes on with. Raises InvalidRequest."""
        fields = await off_loop(partial(decode, kind=KeptFields), body)
        self._is_kept = self._kept.is_on and fields.store is not False
        self._is_background = fields.background is True
        if self._is_background and not self._kept.is_on:
            raise wrong(
                "background", "is not offered: this server keeps no responses (--response-keep 0)"
            )
        tenant = tenant_of(self._caller, fields.user or "")
        given = bytes(fields.input) if self._is_kept else b""
        if self._kept.is_on and refers(body):
            given = self._resolved = await resolved(bytes(fields.input), self._kept, tenant)
        self._input = given if self._is_kept else b""
        if fields.previous_response_id:
            self._previous = fields.previous_response_id
            chain = await self._kept.earlier(self._previous, tenant)
            size = sum(len(asked) + len(response) for asked, response in chain)
            read = partial(conversation_items, chain)
            self._earlier = await in_thread(read) if is_large(size) else read()

    def read(self, exchange: Exchange, body: bytes) -> tuple[list[ValidRequest], RequestOptions]:
        """The request in the body. Raises InvalidRequest naming the field, or NotFound."""
        decoded = decode_with_media(body, ResponseBody, media_urls)
        decoded.content.store = self._is_kept
        if self._resolved and isinstance(decoded.content.input, list):
            merge_resolved(decoded.content.input, self._resolved)
        request, options = read_response(decoded.content, self._generating.model, self._earlier)
        self._earlier = ()
        request = replace(request, inline_media=decoded.media)
        asked = DecodedBody(options, decoded.json, decoded.media)
        found = self._generating.read_options(exchange, asked)
        if self._is_background:
            found = replace(found, keep_ms=max(found.keep_ms, self._kept.keep_ms))
        return [request], found

    async def write(
        self, exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
    ) -> None:
        """The reply, once what is kept of it is."""
        [answer] = answers
        request_id = answer.head.request_id
        if self._is_kept:
            await self._keep(answer)
        try:
            if stream:
                if self._is_background:
                    self._kept.follow_to_its_end(request_id, answer.head.tenant)
                writer = ResponseWriter(answer, with_ids)
                await write_stream(exchange, answers, [writer])
                self._finish(request_id, writer.response)
            elif self._is_background:
                self._kept.take_over(answer)
                await exchange.respond(200, compact(response_object(answer.head, QUEUED)).encode())
            else:
                [outcome] = await answer.whole()
                response = ended_response(answer, outcome)
                self._finish(request_id, response)
                await exchange.respond_in_pieces(answer.slices.joined(written(response)))
        finally:
            if not self._is_background:
                self._kept.release(request_id)

    async def _keep(self, answer: Answer) -> None:
        head = answer.head
        try:
            await self._kept.keep(answer, self._input, self._previous)
        except BaseException:
            if self._is_background:  # it would go on without anybody
                self._kept.drop(head.request_id, head.tenant)
            raise
        finally:
            self._input = b""

    def _finish(self, request_id: str, response: object) -> None:
        if self._is_kept and isinstance(response, dict):
            self._kept.finish_later(request_id, response)


def conversation_items(chain: Sequence[tuple[bytes, bytes]]) -> list[Item]:
    """The items of what was asked and answered, both as JSON."""
    items: list[Item] = []
    for asked, response in chain:
        given = decoder_of(str | list[Item] | None).decode(asked)
        if isinstance(given, str):
            items.append(Item(role="user", content=given))
        elif given:
            items += given
        items += decoder_of(KeptOutput).decode(response).output
    return items
