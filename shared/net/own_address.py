"""The address at which other services reach a service that listens on every address of its machine or container."""

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

import structlog

from shared.errors import Unavailable
from shared.net.backoff import Backoff
from shared.net.redis.url import without_password

log = structlog.get_logger(__name__)

_EVERY_ADDRESS = ("0.0.0.0", "::", "*", "")
_LOOPBACK = "127.0.0.1"
_TRIES = 6
_PAUSES = Backoff(0.5, 4.0)  # 11.5 s in all
_DEFAULT_PORT = 6379


def is_every_address(host: str) -> bool:
    """Whether a server that listens on the host listens on all addresses."""
    return host.strip("[]") in _EVERY_ADDRESS


async def address_toward(redis_url: str, pauses: Backoff = _PAUSES) -> str:
    """This machine's own address on the route to Redis, which all services of a system reach; in brackets where it is
    IPv6. Loopback where Redis is on a unix socket or on loopback: then all of them are on this machine.

    No packet is sent. Raises Unavailable where the name of Redis' host cannot be resolved, or no route leads there,
    after some attempts, with `pauses` between them: a container's network may come up after it.
    """
    url = urlsplit(redis_url)
    if url.scheme == "unix":
        return _LOOPBACK
    host, port = url.hostname or "localhost", url.port or _DEFAULT_PORT
    for failures in range(1, _TRIES + 1):
        try:
            return await _local_address(host, port)
        except OSError as error:
            reason = f"no route to {without_password(redis_url)}: {error}"
        if failures < _TRIES:
            log.warning("the address to announce is not known yet", error=reason)
            await asyncio.sleep(pauses.pause_s(failures))
    raise Unavailable(
        "NO_ROUTE_TO_REDIS",
        f"{reason}; a service that listens on every address announces that of its route to Redis: correct --redis-url,"
        " or give the address at which others reach it by --advertise HOST:PORT",
    )


async def _local_address(host: str, port: int) -> str:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    error = OSError("its name has no address")
    for family, kind, protocol, _, target in found:
        try:
            return _source(family, kind, protocol, target)
        except OSError as failed:  # such as an IPv6 address where there is only IPv4
            error = failed
    raise error


def _source(family: int, kind: int, protocol: int, target: Any) -> str:
    """Connecting a datagram socket looks up the route and sends nothing. Raises OSError."""
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return f"[{address}]" if family == socket.AF_INET6 else address
