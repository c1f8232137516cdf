"""POST /v1/messages/count_tokens."""

from functools import partial

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.admission.sent_files import SentFiles
from services.gateway.api.anthropic.requests import read_count
from services.gateway.api.anthropic.schema import CountBody, TokenCount
from services.gateway.api.anthropic.version import check_version
from services.gateway.decoding.decode import decode, off_loop
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.short_prompts import is_short
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest


class CountTokens:
    """Renders and tokenizes a conversation, and counts."""

    def __init__(
        self,
        model: ServedModel,
        pool: PreprocessPool,
        sent_files: SentFiles,
        body_limits: BodyLimits,
    ) -> None:
        self._model = model
        self._pool = pool
        self._sent_files = sent_files
        self._body_limits = body_limits

    async def count(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/messages/count_tokens: the tokens of a request's prompt, pictures included."""
        check_version(exchange)
        body = await exchange.json_body(self._body_limits)
        prepare = await off_loop(partial(_read, self._model), body)
        del body
        exchange.release_body()
        prepare.request_id = caller.request_id
        prepare.tenant = tenant_of(caller, "")
        async with exchange.while_connected():
            if is_short(prepare):
                prepared = await self._pool.prepare(prepare)
            else:
                async with self._sent_files.serialized(prepare, caller) as prompt:
                    prepared = await self._pool.prepare(prompt)
            await exchange.reply(TokenCount(input_tokens=len(prepared.token_ids) // 4))


def _read(model: ServedModel, body: bytes) -> PrepareRequest:
    return read_count(decode(body, CountBody), model)
