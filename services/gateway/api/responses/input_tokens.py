"""POST /v1/responses/input_tokens: how many tokens the prompt of a response would have."""

from functools import partial

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.admission.sent_files import SentFiles
from services.gateway.api.generating import Generating
from services.gateway.api.responses.creation import Creation
from services.gateway.api.responses.kept import KeptResponses
from services.gateway.api.responses.schema import InputTokens
from services.gateway.decoding.decode import off_loop
from services.gateway.http.exchange import BodyLimits, Exchange


class CountInput:
    """Renders and tokenizes what a response would be asked, and counts."""

    def __init__(
        self,
        generating: Generating,
        kept: KeptResponses,
        pool: PreprocessPool,
        sent_files: SentFiles,
        body_limits: BodyLimits,
    ) -> None:
        self._generating = generating
        self._kept = kept
        self._pool = pool
        self._sent_files = sent_files
        self._body_limits = body_limits

    async def count(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/responses/input_tokens: the tokens of its prompt, pictures and what `previous_response_id` names
        included.
        """
        body = await exchange.json_body(self._body_limits)
        one = Creation(self._generating, self._kept, caller)
        await one.look_up(body)
        [request], _ = await off_loop(partial(one.read, exchange), body)
        del body
        prepare = request.prepare
        prepare.request_id = caller.request_id
        prepare.tenant = tenant_of(caller, request.user)
        async with exchange.while_connected():
            if request.has_short_prompt:
                exchange.release_body()
                prepared = await self._pool.prepare(prepare)
            else:
                inline = request.inline_media
                async with self._sent_files.serialized(prepare, caller, inline) as prompt:
                    exchange.release_body()
                    prepared = await self._pool.prepare(prompt)
            await exchange.reply(InputTokens(input_tokens=len(prepared.token_ids) // 4))
