"""A token that the internal gRPC services require of each other: one for a system, from a file; off without one.

It is for services that listen on TCP, such as in containers: anybody who reaches a decoder's port could otherwise
read and control what runs there. Unix sockets are protected by the modes of their files. A process has one token for
all of its
calls, set once at its start by `use`. Health checks need none.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from shared.net import secret_files

_KEY = "tessera-internal-token"  # of the metadata
_FLAG = "--internal-token-file"
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)

_token = ""


def use(file: Path | None) -> None:
    """From now on this process sends and requires the token in the file; neither without a file.

    Raises InvalidRequest if it cannot be read, or holds no token or several.
    """
    global _token
    if file is not None:
        secret_files.warn_if_open(file, _FLAG)
    _token = secret_files.read_one(file, _FLAG) if file is not None else ""


def in_use() -> bool:
    """Whether this process has one."""
    return bool(_token)


def with_token(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """The channel, whose calls carry the token if there is one."""
    return cast(grpc.aio.Channel, _Channel(channel, _token)) if _token else channel


def guards() -> list[grpc.aio.ServerInterceptor]:
    """Interceptors that refuse callers without the token; none if there is no token."""
    return [_Guard(_token)] if _token else []


class _Guard(grpc.aio.ServerInterceptor):
    """Checks a call when it begins."""

    def __init__(self, token: str) -> None:
        self._digest = _digest(token)

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        if handler_call_details.method.startswith(_OPEN_SERVICES):
            return await continuation(handler_call_details)
        sent = dict(handler_call_details.invocation_metadata or ()).get(_KEY, "")
        if not hmac.compare_digest(_digest(str(sent)), self._digest):
            return _REFUSAL
        return await continuation(handler_call_details)


async def _refuse(requests: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        f"this service is for the other services of its system: give this process the same {_FLAG}",
    )


_REFUSAL: Any = grpc.stream_stream_rpc_method_handler(_refuse)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class _Channel:
    """A channel that adds the token to the metadata of each call.

    No interceptor: the library's stand between a stream and its messages, and a step takes two of those.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._token = token
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            setattr(self, kind, self._opening(getattr(channel, kind)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> "_Channel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def _opening(self, open_method: Callable[..., Any]) -> Callable[..., Any]:
        """The same as `open_method`, with the token in every call of the method."""

        def opened(*words: Any, **options: Any) -> Callable[..., Any]:
            method = open_method(*words, **options)

            def call(*request: Any, metadata: Sequence[Any] | None = None, **rest: Any) -> Any:
                return method(*request, metadata=(*(metadata or ()), (_KEY, self._token)), **rest)

            return call

        return opened
