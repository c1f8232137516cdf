"""HTTP/1.1 on asyncio transports: kept-alive connections and streamed answers.

Our own because it takes half the processor time of httpx for each event (`benchmarks/README.md`).
"""

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

_LONGEST_REFUSAL = 4096  # bytes


class HttpError(Exception):
    """The server could not be reached, or closed the connection in the middle of an answer."""


class HttpRefusal(HttpError):
    """The server answered with a status other than 200; `retry_after_s` is its Retry-After in seconds, 0 if none."""

    def __init__(self, status: int, body: bytes, retry_after_s: float = 0.0) -> None:
        self.reason = message_of(body)
        super().__init__(f"HTTP {status}: {self.reason}")
        self.status = status
        self.retry_after_s = retry_after_s


class Connection(asyncio.Protocol):
    """One connection with at most one request in progress."""

    def __init__(self) -> None:
        self.is_reusable = False
        self.status = 0
        self.retry_after_s = 0.0
        self.refusal = bytearray()  # body of an answer other than 200
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._on_body: Callable[[bytes], object] = bytes
        self._done: asyncio.Future[None] | None = None
        self._is_framed = False
        self._has_begun = False
        self.is_open = False

    async def exchange(self, request: bytes, on_body: Callable[[bytes], object]) -> None:
        """Sends a request and calls `on_body` with each piece of the body of a 200. Raises HttpError."""
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._is_framed = self._has_begun = self.is_reusable = False
        self.status = 0
        self.retry_after_s = 0.0
        self.refusal = bytearray()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = None

    @property
    def has_begun(self) -> bool:
        """Whether anything of the last answer has been received."""
        return self._has_begun

    @property
    def is_to_itself(self) -> bool:
        """Whether the socket is connected to itself.

        TCP allows that on a port of the ephemeral range where nothing listens: an attempt while a server restarts
        would then keep the server from its port.
        """
        own = self._transport.get_extra_info("sockname")
        return own is not None and own == self._transport.get_extra_info("peername")

    def close(self) -> None:
        """Closes the connection, and so ends the request in progress."""
        self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the same methods
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Bytes were received."""
        if self._done is None:  # no request is in progress
            self.close()
            return
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"this is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """The server closed it, or the network broke."""
        self.is_open = self.is_reusable = False
        if self.status and not self._is_framed and error is None:
            self._finish()  # the body of an answer without a length ends with its connection
        else:
            self._fail("the server closed the connection in the middle of an answer")

    # httptools' side

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._is_framed = True
        elif name == b"retry-after" and value.isdigit():  # the form with a date is not used
            self.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        """The status is known."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, without its framing."""
        if self.status == 200:
            self._on_body(body)
        elif len(self.refusal) < _LONGEST_REFUSAL:
            self.refusal += body

    def on_message_complete(self) -> None:
        """The answer is complete."""
        self.is_reusable = self.is_open and self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpError(message))


class HttpClient:
    """Requests to one server over a pool of connections that grows with the number of requests in progress."""

    def __init__(self, base_url: str, api_key: str = "", tls: ssl.SSLContext | None = None) -> None:
        """`tls` is for https, that of the system unless given. Raises ValueError if `base_url` is not a URL."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is not an address such as http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        path = parts.path.rstrip("/")
        self._prefix = path.removesuffix("/v1")
        name = parts.netloc.rpartition("@")[2]
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {name}\r\n{key}Content-Type: application/json\r\n"
        self._idle: list[Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        on_body: Callable[[bytes], object],
        headers: str = "",
    ) -> None:
        """Returns when a 200 is complete; `on_body` got its pieces. Raises HttpError and HttpRefusal.

        `headers` are further header lines, each with its line end. Cancelling closes the connection.
        """
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        while True:
            connection, is_fresh = await self._connection()
            try:
                await connection.exchange(head + body, on_body)
            except HttpError:
                if is_fresh or connection.has_begun:
                    raise
                continue  # the server had closed the idle connection
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
            if connection.status != 200:
                raise HttpRefusal(
                    connection.status, bytes(connection.refusal), connection.retry_after_s
                )
            return

    async def get(self, path: str) -> bytes:
        """A whole body. Raises HttpError and HttpRefusal."""
        pieces: list[bytes] = []
        await self.request("GET", path, b"", pieces.append)
        return b"".join(pieces)

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self) -> tuple[Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                Connection, self._host, self._port, ssl=self._tls
            )
        except ssl.SSLCertVerificationError as error:
            raise HttpError(
                f"the certificate of {self._host}:{self._port} is not trusted ({error.verify_message}):"
                " give the authority that signed it, --ssl-ca-certs"
            ) from None
        except OSError as error:
            raise HttpError(f"nobody answers at {self._host}:{self._port}: {error}") from None
        if connection.is_to_itself:
            connection.close()
            raise HttpError(f"nobody answers at {self._host}:{self._port}")
        return connection, True


def message_of(body: bytes) -> str:
    """The message in an error's body: in OpenAI's form, in FastAPI's, or the body itself."""
    text = body.decode(errors="replace").strip()
    try:
        content = json.loads(text)
    except ValueError:
        return text[:500]
    if isinstance(content, dict):
        found = content.get("error", content.get("detail", content.get("message", text)))
        return str(found.get("message", found) if isinstance(found, dict) else found)
    return text[:500]
