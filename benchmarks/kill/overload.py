"""Loads that no client should make, on the REST API of a gateway, while others read their streams.

None of them may lose an accepted request or a process: a busy gateway must not be taken for a crashed one.
"""

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

_BURST = 2000  # connections
_SILENT = 500
_SLOW = 300
_LARGE = 16  # connections that send large headers
_LARGE_BYTES = 64 << 20  # of headers, on each
_UNFINISHED = 30  # bodies
_UNFINISHED_BYTES = 31 << 20
_MESSAGES = 300_000  # in a body, which is legal but for its length
_PIECE = b"X-Filler: " + b"a" * 4000 + b"\r\n"
_DRIP_S = 0.5
_ANSWER_S = 60.0

# The base URL of a gateway, and seconds that the load goes on; returns what was done, in words.
Overload = Callable[[str, float], Awaitable[str]]


async def burst(url: str, seconds: float) -> str:
    """Many connections at once, each with a small request."""
    request = _head("GET", "/v1/models", "Connection: close\r\n\r\n")
    answers = await _all(_BURST, lambda: _is_answered(url, request), _ANSWER_S)
    return f"{_BURST} connections, {answers.count(True)} answered"


async def silent(url: str, seconds: float) -> str:
    """Connections that never send anything."""

    async def wait() -> bool:
        async with _connection(url) as (reader, _):
            return not await reader.read(1)

    closed = await _all(_SILENT, wait, seconds)
    return f"{_SILENT} silent connections, {closed.count(True)} closed by the gateway"


async def slow_headers(url: str, seconds: float) -> str:
    """Connections whose header comes a few bytes at a time, and never ends."""

    async def drip() -> bool:
        async with _connection(url) as (_, writer):
            writer.write(_head("POST", "/v1/chat/completions", ""))
            while not writer.transport.is_closing():
                writer.write(b"X-Drip: 1\r\n")
                await asyncio.sleep(_DRIP_S)
            return True

    closed = await _all(_SLOW, drip, seconds)
    return f"{_SLOW} slow headers, {closed.count(True)} cut off"


async def large_headers(url: str, seconds: float) -> str:
    """Headers of tens of megabytes each."""
    sent = 0

    async def pour() -> bool:
        nonlocal sent
        async with _connection(url) as (_, writer):
            writer.write(_head("GET", "/v1/models", ""))
            for _ in range(_LARGE_BYTES // len(_PIECE)):
                writer.write(_PIECE)
                await writer.drain()
                sent += len(_PIECE)
        return True

    await _all(_LARGE, pour, _ANSWER_S)
    return f"{_LARGE} large headers, {sent >> 20} MiB taken"


async def large_bodies(url: str, seconds: float) -> str:
    """Bodies of hundreds of thousands of messages, and bodies that stop short of their end."""
    message = b'{"role":"user","content":"a"}'
    many = b'{"messages":[' + b",".join([message] * _MESSAGES) + b"]}"

    head = f"Content-Length: {len(many)}\r\nConnection: close\r\n\r\n"
    request = _head("POST", "/v1/chat/completions", head) + many

    async def stop_short() -> bool:
        async with _connection(url) as (_, writer):
            head = f"Content-Length: {_UNFINISHED_BYTES}\r\n\r\n"
            writer.write(_head("POST", "/v1/chat/completions", head))
            for _ in range((_UNFINISHED_BYTES >> 16) - 1):
                writer.write(bytes(1 << 16))
                await writer.drain()
            await asyncio.sleep(seconds)
        return True

    short = asyncio.create_task(_all(_UNFINISHED, stop_short, _ANSWER_S))
    answers = [await _within(_is_answered(url, request), _ANSWER_S) for _ in range(3)]
    await short
    return f"3 large bodies, {answers.count(True)} answered; {_UNFINISHED} unfinished ones"


OVERLOADS: dict[str, Overload] = {
    "burst": burst,
    "silent": silent,
    "slow-headers": slow_headers,
    "large-headers": large_headers,
    "large-bodies": large_bodies,
}


def _head(method: str, path: str, rest: str) -> bytes:
    kind = "Content-Type: application/json\r\n" if method == "POST" else ""
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}{rest}".encode()


async def _is_answered(url: str, request: bytes) -> bool:
    async with _connection(url) as (reader, writer):
        writer.write(request)
        return (await reader.read(64)).startswith(b"HTTP/1.1 ")


@contextlib.asynccontextmanager
async def _connection(
    url: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A reader and a writer, for the block. Raises OSError."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _all(
    count: int, make: Callable[[], Coroutine[Any, Any, bool]], within_s: float
) -> list[bool]:
    """What so many at once say; see `_within`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    until = time.monotonic() + within_s
    return await asyncio.gather(*(_within(make(), until - time.monotonic()) for _ in range(count)))


async def _within(done: Coroutine[Any, Any, bool], within_s: float) -> bool:
    """What it says; False if that takes too long, or the gateway closes the connection (which it may)."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(within_s):
            return await done
    return False
