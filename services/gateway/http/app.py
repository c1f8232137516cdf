"""The ASGI application: a table of routes, and what every response has in common."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

import structlog

from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.errors import MethodNotAllowed, NoRoute
from services.gateway.http.cross_origin import CrossOrigin
from services.gateway.http.endpoint import Endpoint
from services.gateway.http.errors import error_response
from services.gateway.http.exchange import BodyLimits, Exchange, Receive, Scope, Send
from services.gateway.http.hosts import Hosts
from services.gateway.http.routes import RouteTable
from services.gateway.telemetry.metrics.http_metrics import NO_ROUTE, HttpMetrics
from services.gateway.telemetry.refusals import Refusals, Refused
from shared.environment import monotonic
from shared.errors import Cancelled, Internal, ServingError, Unavailable
from shared.queue.keys import new_request_id
from shared.telemetry import request_names

log = structlog.get_logger(__name__)

# How long the error that ends a request at shutdown may take to send: the client may not read.
_LAST_ERROR_S = 1.0
_CLIENT_LEFT = 499  # where there was no response


class App:
    """Finds the handler of a request and answers whatever error it raises."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        keys: ApiKeys,
        cross_origin: CrossOrigin,
        hosts: Hosts,
        metrics: HttpMetrics,
        refusals: Refusals,
        tag: str,
        no_route: Callable[[str, Collection[str]], NoRoute],
        body_limits: BodyLimits,
    ) -> None:
        """`tag` is the model's, in the ids of requests. `no_route` gives the error for a path at which there is
        nothing, and gets the patterns of those that there are.
        """
        self._routes = RouteTable(endpoints, body_limits)
        self._no_route = no_route
        self._keys = keys
        self._cross_origin = cross_origin
        self._hosts = hosts
        self._metrics = metrics
        self._refusals = refusals
        self._tag = tag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one HTTP request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, new_request_id(self._tag), self.form)
        request_names.bind(
            exchange.request_id, exchange.client_request_id, exchange.header("traceparent")
        )
        exchange.common_headers = self._cross_origin.headers(exchange)
        began = monotonic()
        try:
            await self._answer(exchange, self._handle)
        finally:
            exchange.release_body()
            self._count(exchange, monotonic() - began)

    @property
    def form(self) -> Endpoint:
        """The API whose errors those of unknown paths are."""
        return self._routes.endpoint_of("")

    @property
    def generating(self) -> Sequence[str]:
        """The paths below /v1 whose POST asks for one answer."""
        return self._routes.generating()

    async def call(self, exchange: Exchange, caller: Caller) -> None:
        """Answers a call that the gateway makes itself, for somebody whose key has been checked."""

        async def handle(exchange: Exchange) -> None:
            found = self._routes.find(exchange.path)
            if found is None or exchange.method not in found.methods:
                raise self._no_route(exchange.path, self._routes.patterns)
            mounted = found.methods[exchange.method]
            exchange.form = mounted.endpoint
            await mounted.route.handler(exchange, caller)

        request_names.bind(
            exchange.request_id, exchange.client_request_id, exchange.header("traceparent")
        )
        try:
            await self._answer(exchange, handle)
        finally:
            exchange.release_body()

    def refusal(self, path: str, error: ServingError) -> bytes:
        """A whole response to a request that could not be read, the last one of its connection; `path` is empty where
        it is not known.
        """
        return error_response(error, self._routes.endpoint_of(path))

    def _count(self, exchange: Exchange, seconds: float) -> None:
        declared = exchange.header("content-length")
        self._metrics.ended(
            exchange.method,
            exchange.handler or NO_ROUTE,
            exchange.status or _CLIENT_LEFT,
            request_bytes=int(declared) if declared.isdecimal() else 0,
            response_bytes=exchange.response_bytes,
            seconds=seconds,
        )

    async def _answer(
        self, exchange: Exchange, handle: Callable[[Exchange], Awaitable[None]]
    ) -> None:
        began = monotonic()
        try:
            await handle(exchange)
        except ServingError as error:
            self._refused(exchange, error, began)
            await _answer_error(exchange, error)
        except asyncio.CancelledError:
            # The time that a shutdown allows is over.
            closing = Unavailable(
                "SHUTTING_DOWN", "this gateway is shutting down; go on, or ask again, at another"
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_ERROR_S):
                    await _answer_error(exchange, closing)
            raise
        except Exception as error:
            log.exception("unexpected error", path=exchange.path[:200])
            failure = _internal(exchange, error)
            self._refused(exchange, failure, began)
            await _answer_error(exchange, failure)

    def _refused(self, exchange: Exchange, error: ServingError, began: float) -> None:
        if exchange.generates and not exchange.accepted:
            refused = Refused(
                exchange.request_id,
                exchange.client_request_id,
                exchange.header("traceparent"),
                exchange.path,
                exchange.tenant,
            )
            self._refusals.note(error, refused, began)

    async def _handle(self, exchange: Exchange) -> None:
        found = self._routes.find(exchange.path)
        mounted = found.methods.get(_method(exchange)) if found is not None else None
        exchange.form = mounted.endpoint if mounted else self._routes.endpoint_of(exchange.path)
        if found is None or not found.is_probe:
            self._hosts.check(exchange)
        if found is None:
            raise self._no_route(exchange.path, self._routes.patterns)
        exchange.generates = mounted.route.generates if mounted else found.generates
        exchange.handler = found.pattern
        # A browser's question carries no key.
        if await self._cross_origin.preflight(exchange, found.methods):
            return
        if mounted is None:
            raise _not_taken(exchange, found.methods)
        route = mounted.route
        self._hosts.check_origin(exchange, may_call=self._cross_origin.may_call(exchange))
        caller = self._keys.caller(
            exchange.request_id,
            exchange.header,
            (*exchange.form.key_headers, *route.key_headers),
            needed=route.needs_key,
        )
        if exchange.generates:
            exchange.tenant = tenant_of(caller, "")  # until its body says more
        await route.handler(exchange, replace(caller, client_request_id=exchange.client_request_id))


def _method(exchange: Exchange) -> str:
    """The method whose route answers."""
    return "GET" if exchange.method == "HEAD" else exchange.method


def _not_taken(exchange: Exchange, methods: Collection[str]) -> MethodNotAllowed:
    allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
    return MethodNotAllowed(
        "METHOD_NOT_ALLOWED",
        f"{exchange.path[:200]} does not take {exchange.method[:20]}, but {allowed}",
        allow=allowed,
    )


async def _answer_error(exchange: Exchange, error: ServingError) -> None:
    if isinstance(error, Cancelled) and error.reason == "CLIENT_GONE":
        return
    if exchange.started:
        await exchange.fail_stream(error)
    else:
        await exchange.fail(error)


def _internal(exchange: Exchange, error: Exception) -> Internal:
    name = exchange.client_request_id or exchange.request_id
    return Internal("INTERNAL", f"internal error ({type(error).__name__}) in request {name}")
