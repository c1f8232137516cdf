"""The REST door as a raw ASGI application: routes, and what every response has in common."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from services.gateway.admission import Caller
from services.gateway.answers import Answers
from services.gateway.api_keys import ApiKeys
from services.gateway.http import Exchange, Receive, Scope, Send
from services.gateway.information import Information
from services.gateway.openai_errors import MethodNotAllowed, NoRoute, error_event
from shared.errors import Cancelled, Internal, ServingError, Unavailable
from shared.keys import new_request_id

log = structlog.get_logger(__name__)

Handler = Callable[[Exchange, Caller], Awaitable[None]]

# Probes, scrapers and the page itself carry no key.
_OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/metrics", "/version"})
_MODELS = "/v1/models/"


class App:
    """Finds the handler of a request and answers whatever error it raises."""

    def __init__(self, answers: Answers, information: Information, keys: ApiKeys, tag: str) -> None:
        self._keys = keys
        self._tag = tag
        get: dict[str, Handler] = {
            "/": information.page,
            "/health": information.ready,
            "/health/ready": information.ready,
            "/health/live": information.live,
            "/metrics": information.metrics,
            "/version": information.version,
            "/v1/models": information.models,
            _MODELS: information.one_model,
        }
        post: dict[str, Handler] = {
            "/v1/chat/completions": answers.chat,
            "/v1/completions": answers.completion,
            "/tokenize": information.tokenize,
            "/detokenize": information.detokenize,
        }
        self._routes = {path: ("GET", handler) for path, handler in get.items()}
        self._routes |= {path: ("POST", handler) for path, handler in post.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one HTTP request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, new_request_id(self._tag))
        try:
            await self._handle(exchange)
        except ServingError as error:
            await _answer_error(exchange, error)
        except asyncio.CancelledError:
            # The time that a shutdown allows is over.
            closing = Unavailable("SHUTTING_DOWN", "this server is shutting down; send it again")
            await _answer_error(exchange, closing)
        except Exception as error:
            log.exception("unexpected error", request_id=exchange.request_id, path=exchange.path)
            await _answer_error(exchange, _internal(exchange, error))

    async def _handle(self, exchange: Exchange) -> None:
        handler = self._find(exchange)
        caller = self._keys.caller(
            exchange.request_id,
            exchange.header(b"authorization"),
            exchange.header(b"traceparent"),
            needed=exchange.path not in _OPEN_PATHS,
        )
        await handler(exchange, caller)

    def _find(self, exchange: Exchange) -> Handler:
        path = exchange.path
        if path.startswith(_MODELS) and len(path) > len(_MODELS):
            path = _MODELS
        if path not in self._routes:
            raise NoRoute("NO_SUCH_ROUTE", f"there is nothing at {path[:200]}")
        method, handler = self._routes[path]
        if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
            raise MethodNotAllowed(
                "METHOD_NOT_ALLOWED", f"{path[:200]} takes {method} only", allow=method
            )
        return handler


async def _answer_error(exchange: Exchange, error: ServingError) -> None:
    if isinstance(error, Cancelled) and error.reason == "CLIENT_GONE":
        return
    if exchange.started:
        await exchange.end_stream(error_event(error))
    else:
        await exchange.fail(error)


def _internal(exchange: Exchange, error: Exception) -> Internal:
    return Internal(
        "INTERNAL", f"internal error ({type(error).__name__}) in request {exchange.request_id}"
    )
