"""A page of metrics for Prometheus on a port of its own: `GET /metrics`, and nothing else.

Answered on the service's event loop, where the numbers are written: no locks, and nothing is read in between. The
servers that come with prometheus_client begin a thread for each connection and wait for its request as long as it
likes; these pages may listen where strangers are.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NamedTuple

import structlog

from shared.errors import InvalidRequest, Unavailable
from shared.net.supervise import failures
from shared.telemetry.series import Measured, Measures, Series

log = structlog.get_logger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_HEAD_BYTES = 8 << 10
_MOST_CONNECTIONS = 16
_EXCHANGE_S = 5.0  # from the connection to the end of the answer

INFO = Series(
    "tessera_service_info",
    "gauge",
    "Which service this process is, and of which model; always 1.",
    ("service", "model_name"),
)
BACKGROUND_FAILURES = Series(
    "tessera_background_failures",
    "counter",
    "How often a background task of this process failed and was begun again.",
    ("task",),
)
SERIES = (INFO, BACKGROUND_FAILURES)


class Page(NamedTuple):
    """A page of metrics as it is sent."""

    body: bytes
    content_type: str


# The page in the form that a header Accept asks for, if there are several.
MakePage = Callable[[str], Awaitable[Page]]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, the host without brackets. Raises InvalidRequest."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65_535:
        raise InvalidRequest(
            "BAD_ADDRESS",
            f"--metrics-listen: {address!r} is no host:port, such as 127.0.0.1:9100",
            field="metrics_listen",
        )
    return host.strip("[]"), int(port)


def page(service: str, model_name: str, *measures: Measures) -> MakePage:
    """A page in Prometheus's text format: what `measures` read, and what every process has."""
    # Imported where a page is served alone: it takes 40 ms, and a start waits for it.
    from shared.telemetry.exposition import process_registry, text_of

    registry = process_registry(EveryProcess(service, model_name), *measures)

    async def make(accept: str) -> Page:
        return Page(text_of(registry), CONTENT_TYPE)

    return make


@contextlib.asynccontextmanager
async def serve_metrics(listen: str, prepare: Callable[[], MakePage]) -> AsyncIterator[int]:
    """Serves the page of what `prepare` returns at `listen` (host:port) until the block ends; yields its port, 0 where
    `listen` is empty and there is none. Raises InvalidRequest for an address that is none, Unavailable where it cannot
    be had.
    """
    if not listen:
        yield 0
        return
    host, port = split_address(listen)
    served = _Server(prepare())
    try:
        server = await asyncio.start_server(served.answer, host, port, limit=_MOST_HEAD_BYTES)
    except OSError as error:
        raise Unavailable(
            "CANNOT_LISTEN", f"--metrics-listen: cannot listen on {listen}: {error.strerror}"
        ) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await served.close()


class _Server:
    """Answers connections, each for one request."""

    def __init__(self, make: MakePage) -> None:
        self._make = make
        self._open: set[asyncio.Task[None]] = set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its request to its end."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._open.add(task)
        try:
            async with asyncio.timeout(_EXCHANGE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._response(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (
            OSError,
            EOFError,
            asyncio.LimitOverrunError,
        ):  # gone, slow (TimeoutError) or no HTTP
            pass
        except asyncio.CancelledError:  # by `close`, which waits for this
            pass
        finally:
            writer.transport.abort()
            self._open.discard(task)

    async def close(self) -> None:
        """Ends what is open."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return _message(b"404 Not Found", b"the metrics are at /metrics\n")
        if method not in (b"GET", b"HEAD"):
            return _message(b"405 Method Not Allowed", b"GET alone\n", b"Allow: GET, HEAD\r\n")
        try:
            body, content_type = await self._make(_accept(head))
        except Exception:
            log.exception("the page of metrics failed")
            return _message(b"500 Internal Server Error", b"the page failed; the log says why\n")
        kind = content_type.encode()
        return _message(b"200 OK", body, kind=kind, without_body=method == b"HEAD")


def _accept(head: bytes) -> str:
    """The header Accept; "" without one."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"accept":
            return value.strip().decode("latin-1")
    return ""


def _message(
    status: bytes,
    body: bytes,
    headers: bytes = b"",
    *,
    kind: bytes = b"text/plain; charset=utf-8",
    without_body: bool = False,
) -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n%b\r\n"
    return head % (status, kind, len(body), headers) + (b"" if without_body else body)


class EveryProcess:
    """What every process says of itself."""

    def __init__(self, service: str, model_name: str) -> None:
        self._who = service, model_name

    def read(self) -> Iterator[Measured]:
        """All series."""
        yield INFO.by([(self._who, 1)])
        yield BACKGROUND_FAILURES.by(((task,), count) for task, count in failures.items())
