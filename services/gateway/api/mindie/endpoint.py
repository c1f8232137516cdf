"""MindIE's routes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from json.encoder import encode_basestring
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from services.gateway.admission.api_keys import BEARER
from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.mindie.replies import InferWriter, error_reply, whole
from services.gateway.api.mindie.requests import read_infer
from services.gateway.api.mindie.schema import (
    InferRequest,
    StopReply,
    StopRequest,
    TokenizeReply,
    TokenizeRequest,
)
from services.gateway.api.parts import Api, Parts
from services.gateway.api.token_lists import listed
from services.gateway.decoding.bounds import text, wrong
from services.gateway.decoding.decode import decode, off_loop
from services.gateway.following.answer import Answer
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from services.gateway.http.streams import write_stream
from services.gateway.reading.media.data_urls import DecodedBody, decode_with_media, serialized
from services.gateway.reading.prompt_parts import media_urls
from services.gateway.reading.short_prompts import is_short
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import ServingError
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_STOP = "/stopInfer"
_LONGEST_ID = 256

_B = TypeVar("_B", bound=msgspec.Struct)


class MindieEndpoint:
    """POST /infer, /v1/tokenizer, and stopInfer of a model."""

    roots = ("/infer", "/v1/tokenizer")
    key_headers = (BEARER,)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._generating = parts.generating
        self.routes: Sequence[Route] = (
            Route("POST", "/infer", self._infer, InferRequest, generates=True),
            Route("POST", "/v1/tokenizer", self._tokenize, TokenizeRequest, TokenizeReply),
            Route("POST", f"/v2/models/*{_STOP}", self._stop, StopRequest, StopReply),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"error", "error_type"}."""
        return error_reply(error)

    async def _infer(self, exchange: Exchange, caller: Caller) -> None:
        await self._generating.answer(exchange, caller, self._read, _write)

    def _read(self, exchange: Exchange, body: bytes) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = decode_with_media(body, InferRequest, lambda found: media_urls(found.inputs))
        request, options = read_infer(decoded.content, self._parts.model)
        found = DecodedBody(options, decoded.json, decoded.media)
        request = replace(request, inline_media=decoded.media)
        return [request], self._generating.read_options(exchange, found)

    async def _tokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/tokenizer: the tokens of a text."""
        body = await self._body(exchange, TokenizeRequest)
        with_texts = body.do_decode is not False
        if body.inputs is None:
            raise wrong("inputs", "is missing: send a text")
        prepare = PrepareRequest(
            request_id=caller.request_id, tenant=tenant_of(caller, ""), text=body.inputs
        )
        del body
        async with exchange.while_connected():
            prompt = prepare if is_short(prepare) else await serialized(prepare)
            prepared = await self._parts.pool.prepare(prompt)
            del prepare, prompt
            exchange.release_body()
            ids = np.frombuffer(prepared.token_ids, "<i4")
            pieces = _tokenized(ids, self._parts.model.table.pieces if with_texts else None)
            await exchange.respond_in_pieces(self._parts.slices.joined(pieces))

    async def _stop(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v2/models/{model}/stopInfer: ends requests. By the id that the client gave, at the gateway that it
        asked, or by that of the server, at any. Of several that have the id all are ended that can be. Raises NotFound.
        """
        body = await self._body(exchange, StopRequest)
        exchange.release_body()
        name = exchange.path.removeprefix("/v2/models/").removesuffix(_STOP)
        self._parts.model.check_name(name)
        own_id = text("id", body.id, _LONGEST_ID)
        if not own_id:
            raise wrong("id", "is missing: send the id of the request")
        tenant = tenant_of(caller, "")
        found = self._parts.held_requests.named(own_id, tenant) or [own_id]
        failures = []
        for request_id in found:
            try:
                await self._parts.resumption.cancel(request_id, tenant)
            except ServingError as error:
                failures.append(error)
        if len(failures) == len(found):
            raise failures[0]
        await exchange.reply(StopReply(id=own_id))

    async def _body(self, exchange: Exchange, kind: type[_B]) -> _B:
        body = await exchange.json_body(self._parts.body_limits)
        found: _B = await off_loop(partial(decode, kind=kind), body)
        return found


def _tokenized(ids: npt.NDArray[np.int32], texts: Sequence[bytes] | None) -> Iterator[str]:
    """A `TokenizeReply` of `ids` (`[n]`) as JSON, piece by piece: with the texts of the tokens, or the ids."""

    def text_of(token: int) -> str:
        assert texts is not None
        return encode_basestring(texts[token].decode("utf-8", "replace"))

    yield f'{{"token_number":{len(ids)},"tokens":['
    yield from listed(ids, str if texts is None else text_of)
    yield "]}"


async def _write(
    exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
) -> None:
    [answer] = answers
    if stream:
        await write_stream(exchange, answers, [InferWriter(answer, with_ids)])
        return
    [outcome] = await answer.whole()
    await exchange.respond(200, whole(answer, outcome))


MINDIE = Api(MindieEndpoint, {ReplyKind.REPLY_KIND_MINDIE: ReplyForm(InferWriter)})
