"""/v1/requests/{id}: the state of a request, its timeline, the rest of its stream, and its cancellation."""

import msgspec

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.resume import Resumption
from services.gateway.api.tessera.request_status import status_body
from services.gateway.http.endpoint import MakeWriter
from services.gateway.http.exchange import Exchange
from services.gateway.http.streams import write_stream
from services.gateway.telemetry.traces.request_timeline import RequestTimeline
from services.gateway.telemetry.traces.request_timelines import RequestTimelines
from shared.errors import InvalidRequest, NotFound
from shared.telemetry.request_names import is_our_name


class Requests:
    """The handlers for requests that exist. Another tenant's are not found."""

    def __init__(
        self, resumption: Resumption, timelines: RequestTimelines, make_writer: MakeWriter
    ) -> None:
        """`make_writer` gives the writer of the form that an answer's request came in by."""
        self._resumption = resumption
        self._timelines = timelines
        self._make_writer = make_writer

    async def state(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/requests/{id}: how far a request is."""
        state = await self._resumption.find(_name(exchange), _tenant(exchange, caller))
        await exchange.respond(200, status_body(state))

    async def cancel(self, exchange: Exchange, caller: Caller) -> None:
        """DELETE /v1/requests/{id}: cancels a request."""
        state = await self._resumption.cancel(_name(exchange), _tenant(exchange, caller))
        await exchange.respond(200, status_body(state))

    async def timeline(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/requests/{id}/timeline: where a request's time went, in all services, or where it was refused."""
        try:
            state = await self._resumption.find(_name(exchange), _tenant(exchange, caller))
            found = await self._timelines.of(state.head.request_id)
        except NotFound:
            found = await self._refusal(exchange, caller)
            if found is None:
                raise
        if found is None:
            raise NotFound(
                "REQUEST_NOT_FOUND",
                "the request has just been forgotten: answers are kept for ten minutes after their end",
                field="request_id",
            )
        await exchange.respond(200, msgspec.json.encode(found))

    async def _refusal(self, exchange: Exchange, caller: Caller) -> RequestTimeline | None:
        name = _name(exchange)
        if not is_our_name(name):
            return None
        # Before its body was read nobody knew the `user` of a request.
        tenants = {_tenant(exchange, caller), tenant_of(caller, "")}
        return await self._timelines.of_refusal(name, tenants)

    async def stream(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/requests/{id}/stream: the events after `after` or `Last-Event-ID`."""
        last, after = exchange.header("last-event-id"), exchange.query("after")
        # A browser that reconnects sends both: the header is newer then.
        field = "Last-Event-ID" if last else "after"
        async with exchange.while_connected():
            answer = await self._resumption.follow(
                _name(exchange), _tenant(exchange, caller), last or after, field
            )
            exchange.request_id = answer.head.request_id
            try:
                await write_stream(exchange, [answer], [self._make_writer(answer, True)])
            finally:
                answer.close()


def _name(exchange: Exchange) -> str:
    return (
        exchange.path.removeprefix("/v1/requests/")
        .removesuffix("/stream")
        .removesuffix("/timeline")
    )


def _tenant(exchange: Exchange, caller: Caller) -> str:
    """The tenant whose requests are meant: without API keys, callers repeat the `user` of the request."""
    user = exchange.query("user")
    if len(user) > 512:
        raise InvalidRequest(
            "INVALID_VALUE", "user must not be longer than 512 characters", field="user"
        )
    return tenant_of(caller, user)
