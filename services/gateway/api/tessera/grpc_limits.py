"""Limits of the public gRPC API: a call's key is checked before its message is read, memory is reserved before the
message is received, and the message's values are counted before it is parsed.

`reception.py` receives them.
"""

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from services.gateway.admission.api_keys import ApiKeys
from services.gateway.api.tessera.reception import Reception
from services.gateway.body_budget import BodyBudget
from services.gateway.decoding.decode import off_loop
from services.gateway.decoding.wire_limits import check_message, malformed
from services.gateway.telemetry.recent_errors import RecentErrors
from services.gateway.telemetry.request_log import log_refusal
from shared.errors import Overloaded, Unauthenticated
from shared.net.rpc import reflection

_AT_ONCE = 4  # messages of health checks, of which an eighth of the budget is kept free
_MOST_REFLECTIONS = 4
_ROOM_S = 10.0
# What needs no key: whether the server is there, and what it offers.
_OPEN = tuple(f"/{name}/" for name in (health.SERVICE_NAME, *reflection.NAMES))

Handler = Any  # grpc.RpcMethodHandler, whose type does not have its fields


class CallLimits(grpc.aio.ServerInterceptor):
    """The innermost interceptor: its errors reach the caller as those of the methods do."""

    def __init__(
        self,
        keys: ApiKeys,
        most_bytes: int,
        budget: BodyBudget,
        errors: RecentErrors | None = None,
    ) -> None:
        """Every method needs a key where there are `keys`, but for those of health and reflection. A message may have
        `most_bytes`. `errors` are told of calls without a key.
        """
        self._keys = keys
        self._errors = errors or RecentErrors()
        self._calls = Reception(budget, most_bytes)
        # Their messages are small. They have a budget of their own, so that they are answered while bodies wait.
        self._information = Reception(BodyBudget(_AT_ONCE * most_bytes), most_bytes)
        self._reflections = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler, behind the limits."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler_call_details.method.startswith(_OPEN):
            if handler.request_streaming:
                return self._streamed(handler)
            return self._read(handler, self._information)
        found = dict(handler_call_details.invocation_metadata or ())
        try:
            self._keys.caller("", lambda name: str(found.get(name, "")))
        except Unauthenticated as error:
            return _refusing(error, handler_call_details.method, self._errors)
        if handler.request_streaming:
            return self._read_each(handler)
        return self._read(handler, self._calls)

    def _read(self, handler: Handler, reception: Reception) -> Handler:
        """The same handler of a single message, which reads it itself."""

        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            message = _Message(reception, context.peer())
            try:
                request = await message.read(requests, handler.request_deserializer)
                if not handler.response_streaming:
                    yield await handler.unary_unary(request, context)
                elif inspect.isasyncgenfunction(handler.unary_stream):
                    # A caller that leaves closes this generator; the inner one must be closed with it, at once.
                    async with contextlib.aclosing(
                        handler.unary_stream(request, context)
                    ) as responses:
                        async for response in responses:
                            message.release()  # accepted: what was sent is not needed any more
                            yield response
                else:  # Health.Watch, which writes to the context
                    message.release()
                    await handler.unary_stream(request, context)
            finally:
                message.release()

        return grpc.stream_stream_rpc_method_handler(
            answer, response_serializer=handler.response_serializer
        )

    def _read_each(self, handler: Handler) -> Handler:
        """The same handler of a stream of messages, which reads one when it has answered the one before."""
        parse, budget = handler.request_deserializer, self._calls.budget

        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            held = 0

            def release() -> None:
                nonlocal held
                budget.give_back(held)
                held = 0

            async def parsed() -> AsyncGenerator[Any, None]:
                nonlocal held
                async for raw in requests:
                    await budget.wait_for(len(raw), _ROOM_S)
                    held = len(raw)
                    request: Any = raw
                    if parse is not None:
                        request = await off_loop(functools.partial(_parsed, parse), raw)
                    del raw
                    yield request
                    release()

            try:
                async with (
                    contextlib.aclosing(parsed()) as messages,
                    contextlib.aclosing(handler.stream_stream(messages, context)) as responses,
                ):
                    async for response in responses:
                        release()  # accepted, or refused
                        yield response
            finally:
                release()

        return grpc.stream_stream_rpc_method_handler(
            answer, response_serializer=handler.response_serializer
        )

    def _streamed(self, handler: Handler) -> Handler:
        """The same handler of a stream of messages, which is reflection; so many of it at once."""

        async def answer(requests: Any, context: Any) -> AsyncIterator[Any]:
            if self._reflections >= _MOST_REFLECTIONS:
                raise Overloaded("TOO_MANY_CALLS", "too many such calls at once: retry in a moment")
            self._reflections += 1
            try:
                async with contextlib.aclosing(
                    handler.stream_stream(requests, context)
                ) as responses:
                    async for response in responses:
                        yield response
            finally:
                self._reflections -= 1

        return grpc.stream_stream_rpc_method_handler(
            answer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _refusing(error: Unauthenticated, method: str, errors: RecentErrors) -> Handler:
    async def answer(requests: Any, context: Any) -> AsyncIterator[Any]:
        log_refusal(error, 0.0, errors, path=method)
        raise error
        yield  # a generator, as the method may be

    return grpc.stream_stream_rpc_method_handler(answer)


class _Message:
    """The single message of a call, and what the budget holds for it."""

    def __init__(self, reception: Reception, peer: str) -> None:
        self._reception = reception
        self._peer = peer
        self._held = 0

    async def read(self, requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> Any:
        """The message, checked and parsed. Raises Unavailable (no room), TooSlow, InvalidRequest."""
        raw = await self._reception.receive(self._peer, requests)
        self._held = self._reception.most_bytes
        self._give_back(self._held - len(raw))
        return await off_loop(functools.partial(_parsed, parse), raw)

    def release(self) -> None:
        """Holds nothing any more."""
        self._give_back(self._held)

    def _give_back(self, size: int) -> None:
        self._held -= size
        self._reception.budget.give_back(size)


def _parsed(parse: Any, raw: bytes) -> Any:
    kind = parse.__self__.DESCRIPTOR  # the generated class whose `FromString` it is
    check_message(raw, kind)
    try:
        return parse(raw)
    except DecodeError:
        raise malformed(kind) from None
