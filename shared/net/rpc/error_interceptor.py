"""Maps what handlers raise to gRPC errors, for all methods of a server."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from shared.errors import Internal, InvalidRequest, ServingError, Unavailable
from shared.net.rpc.errors import abort
from shared.telemetry import request_names

log = structlog.get_logger(__name__)


# What ends a process or a generator. Whatever else is no `Exception`, as a panic of a library in Rust, is a call's
# error: gRPC would leave its caller without an answer.
_OF_OTHERS = (KeyboardInterrupt, SystemExit, GeneratorExit)


def _as_serving_error(error: BaseException) -> ServingError:
    if isinstance(error, ServingError):
        return error
    if isinstance(error, _OF_OTHERS):
        raise error
    log.exception("unexpected error in a handler")
    return Internal("INTERNAL", f"internal error: {type(error).__name__}")


_HANDLERS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors of unary and streaming handlers alike, so that servicers need no try.

    While the service loads, methods that are not registered yet fail with UNAVAILABLE, so that clients retry.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """The handler of a method, wrapped. Called by gRPC."""
        handler = await continuation(details)
        if handler is None:
            return None if self._is_ready() else _STARTING
        streams = (handler.request_streaming, handler.response_streaming)
        inner = getattr(handler, _HANDLERS[streams])
        wrapped: Any = _streaming if handler.response_streaming else _unary
        factory = getattr(grpc, f"{_HANDLERS[streams]}_rpc_method_handler")
        if not (asyncio.iscoroutinefunction(inner) or _is_async_generator(inner)):
            return handler  # the libraries' own synchronous services map their errors themselves
        return factory(
            functools.partial(wrapped, inner),
            request_deserializer=_parser(handler),
            response_serializer=handler.response_serializer,
        )


def _parser(handler: Any) -> Callable[[bytes], Any] | None:
    """The handler's own, whose errors reach the handler: gRPC would log them with a traceback."""
    parse = handler.request_deserializer

    def parsed(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError:
            error = InvalidRequest("MALFORMED_MESSAGE", "the message is no protobuf of this method")
            if handler.request_streaming:
                raise error from None
            return error

    return parse and parsed


async def _refuse(requests: Any, context: Any) -> None:
    await abort(context, Unavailable("STARTING", "this service is starting; retry in a moment"))


_STARTING: Any = grpc.stream_stream_rpc_method_handler(_refuse)


def _is_async_generator(function: Any) -> bool:
    return bool(getattr(getattr(function, "__code__", None), "co_flags", 0) & 0x200)


async def _unary(inner: Any, request: Any, context: Any) -> Any:
    request_names.bind_metadata(context.invocation_metadata())
    try:
        if isinstance(request, InvalidRequest):
            raise request
        return await inner(request, context)
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except BaseException as error:
        await abort(context, _as_serving_error(error))


async def _streaming(inner: Any, request: Any, context: Any) -> AsyncIterator[Any]:
    request_names.bind_metadata(context.invocation_metadata())
    try:
        if isinstance(request, InvalidRequest):
            raise request
        if _is_async_generator(inner):
            # A caller that leaves closes this generator, and with it the inner one: at once, not when it is collected.
            async with contextlib.aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response
        else:  # a coroutine that writes to the context
            await inner(request, context)
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except BaseException as error:
        await abort(context, _as_serving_error(error))
