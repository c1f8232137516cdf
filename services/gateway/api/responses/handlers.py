"""What is done with a response that there is: it is given, as an object or from any event on, ended, and forgotten."""

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.resume import Resumption
from services.gateway.api.compact_json import compact
from services.gateway.api.responses.events import ResponseWriter
from services.gateway.api.responses.input_items import page_of_items
from services.gateway.api.responses.kept import KeptResponses
from services.gateway.api.responses.response import ID_PREFIX
from services.gateway.decoding.bounds import text, wrong
from services.gateway.http.exchange import Exchange
from services.gateway.http.streams import write_stream
from shared.errors import NotFound
from shared.queue.stores.response_store import KeptResponse

_PATH = "/v1/responses/"
_LONGEST_USER = 512
_LONGEST_NUMBER = 9  # digits


class Responses:
    """The handlers for responses that exist. Another tenant's are not found."""

    def __init__(self, kept: KeptResponses, resumption: Resumption) -> None:
        self._kept = kept
        self._resumption = resumption

    async def get(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/responses/{id}: a response as it is, or its events behind `starting_after`."""
        found = await self._find(exchange, caller)
        if exchange.query("stream") == "true":
            await self._stream(exchange, found, _number(exchange, "starting_after"))
        else:
            await exchange.respond(200, await self._kept.now(found))

    async def cancel(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/responses/{id}/cancel: ends its request."""
        found = await self._find(exchange, caller, "/cancel")
        await exchange.respond(200, await self._kept.cancel(found))

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        """DELETE /v1/responses/{id}: ends its request and forgets it."""
        found = await self._find(exchange, caller)
        await self._kept.forget(found)
        name = ID_PREFIX + found.request_id
        content = {"id": name, "object": "response", "deleted": True}
        await exchange.respond(200, compact(content).encode())

    async def input_items(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/responses/{id}/input_items: what this request sent, a page at a time."""
        found = await self._find(exchange, caller, "/input_items")
        chain = [(found.request_id, found.input)]
        await exchange.respond(200, page_of_items(chain, exchange.query))

    async def _find(self, exchange: Exchange, caller: Caller, behind: str = "") -> KeptResponse:
        """Without API keys, callers repeat the `user` of the request."""
        user = text("user", exchange.query("user"), _LONGEST_USER)
        name = exchange.path.removeprefix(_PATH).removesuffix(behind)
        return await self._kept.find(name, tenant_of(caller, user))

    async def _stream(self, exchange: Exchange, found: KeptResponse, after: int) -> None:
        rid, tenant = found.request_id, found.tenant
        async with exchange.while_connected():
            try:
                answer = await self._resumption.follow(rid, tenant, "", "response_id")
            except NotFound:
                raise NotFound(
                    "EVENTS_NOT_FOUND",
                    "the events of a response are kept for ten minutes after its end: ask for it without stream",
                    field="stream",
                ) from None
            exchange.request_id = rid
            try:
                await write_stream(exchange, [answer], [ResponseWriter(answer, False, after)])
            finally:
                answer.close()


def _number(exchange: Exchange, name: str) -> int:
    """A parameter that counts; -1 where it is not there. Raises InvalidRequest."""
    given = exchange.query(name)
    if not given:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= _LONGEST_NUMBER):
        raise wrong(name, f"must be a whole number, not {given[:24]!r}")
    return int(given)
