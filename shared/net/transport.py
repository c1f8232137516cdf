"""What opens connections and servers: gRPC's and Redis's own libraries, unless `use` has given another transport, as a
simulation of many processes in one does.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc.aio
from redis.asyncio import Redis

from shared.net import listening


@dataclass(frozen=True, slots=True)
class Transport:
    """Called as `grpc.aio.insecure_channel`, `grpc.aio.server`, `Redis.from_url` and
    `listening.refuses_connections`.
    """

    channel: Callable[..., grpc.aio.Channel] = grpc.aio.insecure_channel
    server: Callable[..., grpc.aio.Server] = grpc.aio.server
    redis: Callable[..., Redis] = Redis.from_url
    refuses: Callable[[str], Awaitable[bool]] = listening.refuses_connections


_SYSTEM = Transport()
_current: ContextVar[Transport] = ContextVar("transport", default=_SYSTEM)


@contextlib.contextmanager
def use(transport: Transport) -> Iterator[None]:
    """Inside, and in tasks that are started inside, everything is opened by `transport`."""
    token = _current.set(transport)
    try:
        yield
    finally:
        _current.reset(token)


def channel(address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
    """A gRPC channel."""
    return _current.get().channel(address, options=options)


def server(**options: Any) -> grpc.aio.Server:
    """A gRPC server."""
    return _current.get().server(**options)


def redis(url: str, **options: Any) -> Redis:
    """A client of Redis, which connects when it is used."""
    return _current.get().redis(url, **options)


async def refuses_connections(address: str) -> bool:
    """Whether nothing listens at an address any more, for certain."""
    return await _current.get().refuses(address)
