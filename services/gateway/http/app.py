"""The REST door as a raw ASGI application: routes, and what every response has in common."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.caller import Caller
from services.gateway.api.openai.completions import Answers
from services.gateway.api.openai.errors import MethodNotAllowed, NoRoute, error_event
from services.gateway.api.tessera.information import Information
from services.gateway.api.tessera.requests import Requests
from services.gateway.http.cross_origin import CrossOrigin
from services.gateway.http.exchange import Exchange, Receive, Scope, Send
from services.gateway.http.hosts import Hosts
from services.gateway.telemetry.request_log import log_refusal
from shared.errors import Cancelled, Internal, ServingError, Unavailable
from shared.queue.keys import new_request_id
from shared.telemetry import request_names

log = structlog.get_logger(__name__)

Handler = Callable[[Exchange, Caller], Awaitable[None]]

# Probes, scrapers and the page itself carry no key.
_OPEN_PATHS = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/load", "/metrics", "/ping", "/version"}
)
# Called by address, whatever the server's name.
_PROBED_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
# For a client that does not read.
_LAST_WORDS_S = 1.0
# What asks for tokens: its end is a line of the log, however it ends.
_GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})


class App:
    """Finds the handler of a request and answers whatever error it raises."""

    def __init__(
        self,
        answers: Answers,
        requests: Requests,
        information: Information,
        keys: ApiKeys,
        cross_origin: CrossOrigin,
        hosts: Hosts,
        tag: str,
    ) -> None:
        self._keys = keys
        self._cross_origin = cross_origin
        self._hosts = hosts
        self._tag = tag
        self._routes: dict[str, dict[str, Handler]] = {
            "/": {"GET": information.page},
            "/health": {"GET": information.ready},
            "/health/ready": {"GET": information.ready},
            "/health/live": {"GET": information.live},
            "/ping": {"GET": information.ready, "POST": information.ready},
            "/load": {"GET": information.load},
            "/metrics": {"GET": information.metrics},
            "/version": {"GET": information.version},
            "/v1/models": {"GET": information.models},
            "/v1/models/*": {"GET": information.one_model},
            "/v1/chat/completions": {"POST": answers.chat},
            "/v1/completions": {"POST": answers.completion},
            "/v1/requests/*": {"GET": requests.state, "DELETE": requests.cancel},
            "/v1/requests/*/stream": {"GET": requests.stream},
            "/tokenize": {"POST": information.tokenize},
            "/v1/tokenize": {"POST": information.tokenize},
            "/detokenize": {"POST": information.detokenize},
            "/v1/detokenize": {"POST": information.detokenize},
            "/tokenizer_info": {"GET": information.tokenizer_info},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one HTTP request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, new_request_id(self._tag))
        request_names.bind(exchange.request_id, exchange.client_request_id)
        exchange.common_headers = self._cross_origin.headers(exchange)
        try:
            await self._answer(exchange)
        finally:
            exchange.release_body()

    async def _answer(self, exchange: Exchange) -> None:
        began = time.monotonic()
        try:
            await self._handle(exchange)
        except ServingError as error:
            _log_refusal(exchange, error, began)
            await _answer_error(exchange, error)
        except asyncio.CancelledError:
            # The time that a shutdown allows is over.
            closing = Unavailable(
                "SHUTTING_DOWN", "this gateway is shutting down; go on, or ask again, at another"
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await _answer_error(exchange, closing)
            raise
        except Exception as error:
            log.exception("unexpected error", path=exchange.path[:200])
            failure = _internal(exchange, error)
            _log_refusal(exchange, failure, began)
            await _answer_error(exchange, failure)

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.path not in _PROBED_PATHS:
            self._hosts.check(exchange)
        handlers = self._find(exchange)
        if await self._cross_origin.preflight(exchange, handlers):  # it carries no key
            return
        handler = _handler(exchange, handlers)
        self._hosts.check_origin(exchange, may_call=self._cross_origin.may_call(exchange))
        caller = self._keys.caller(
            exchange.request_id,
            exchange.header("authorization"),
            exchange.header("traceparent"),
            needed=exchange.path not in _OPEN_PATHS,
        )
        await handler(exchange, replace(caller, client_request_id=exchange.client_request_id))

    def _find(self, exchange: Exchange) -> dict[str, Handler]:
        path = exchange.path
        handlers = self._routes.get(path) or self._routes.get(_pattern(path))
        if handlers is None:
            raise NoRoute("NO_SUCH_ROUTE", f"there is nothing at {path[:200]}")
        return handlers


def _handler(exchange: Exchange, handlers: dict[str, Handler]) -> Handler:
    method = "GET" if exchange.method == "HEAD" else exchange.method
    if method not in handlers:
        allowed = ", ".join(handlers)
        raise MethodNotAllowed(
            "METHOD_NOT_ALLOWED", f"{exchange.path[:200]} takes {allowed} only", allow=allowed
        )
    return handlers[method]


def _pattern(path: str) -> str:
    """The path with its third part, which names something, as a star. Names of models may have
    slashes.
    """
    if path.startswith("/v1/models/") and len(path) > len("/v1/models/"):
        return "/v1/models/*"
    parts = path.split("/")
    if len(parts) > 3 and parts[3]:
        parts[3] = "*"
    return "/".join(parts)


def _log_refusal(exchange: Exchange, error: ServingError, began: float) -> None:
    if exchange.path in _GENERATING and not exchange.accepted:
        seconds = time.monotonic() - began
        log_refusal(error, seconds, exchange.tenant, path=exchange.path)


async def _answer_error(exchange: Exchange, error: ServingError) -> None:
    if isinstance(error, Cancelled) and error.reason == "CLIENT_GONE":
        return
    if exchange.started:
        await exchange.end_stream(error_event(error))
    else:
        await exchange.fail(error)


def _internal(exchange: Exchange, error: Exception) -> Internal:
    name = exchange.client_request_id or exchange.request_id
    return Internal("INTERNAL", f"internal error ({type(error).__name__}) in request {name}")
