"""One HTTP request over raw ASGI: reading its body, writing its response, and noticing that the client
has left.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import parse_qs

import msgspec

from services.gateway.body_budget import BodyBudget
from services.gateway.decoding.decode import in_thread, is_large
from services.gateway.errors import BodyTooLarge, TooSlow, WrongMediaType
from services.gateway.http.errors import error_headers
from services.gateway.http.forms import JSON, ErrorForm, StreamForm
from shared.errors import Cancelled, ServingError, Unavailable
from shared.telemetry.request_names import clients_name

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# A body may take this long, and a second more for each so many bytes that have come.
_BODY_LEAST_S = 60.0
_BODY_LEAST_BYTES_PER_S = 16 << 10
_SECOND_S = 1.0
_BLOCKED_S = 60.0
_DISCARD_S = 2.0
_CHECK_S = 10.0
_ANTHROPIC = "anthropic-version"
# Bytes of an answer that is sent at once.
_SMALL = 64 << 10
# Frames are lines of JSON in UTF-8. Characters at which some readers end lines, of those that JSON leaves as they are,
# are written as escapes: `str.splitlines` takes them for ends, and so do clients that use it.
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\u0085\u2028\u2029")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one body, and the budget that all share."""

    most_bytes: int
    silence_s: float  # longest time without a byte
    budget: BodyBudget


class Exchange:
    """One HTTP request and its response."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        request_id: str,
        form: ErrorForm,
        *,
        blocked_s: float = _BLOCKED_S,
        check_s: float = _CHECK_S,
    ) -> None:
        """`form` is that of errors while the request's API is not known. A client that has not read anything of a
        stream for `blocked_s` counts as gone; that is looked at every `check_s`.
        """
        self.method: str = scope["method"]
        # A slash at its end means nothing.
        self.path: str = scope["path"].rstrip("/") or "/"
        self.request_id = request_id
        self.started = False
        # The status of the response, once it has begun, and its Content-Length; 0 until then, and of streams.
        self.status = self.response_bytes = 0
        # Why it failed, where the response is an error.
        self.reason = ""
        # The path of its route, once it is known.
        self.handler = ""
        # Whether it asks for tokens; whether it was accepted, so that its answer logs its end.
        self.generates = False
        self.accepted = False
        # The tenant, once the caller is known.
        self.tenant: str | None = None
        # The errors of the API that was called.
        self.form = form
        # Of every response, whatever it says.
        self.common_headers: list[tuple[bytes, bytes]] = []
        # Since when a chunk waits for the client to read; 0 while none does.
        self.blocked_since = 0.0
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._query: bytes = scope.get("query_string", b"")
        self._blocked_s, self._check_s = blocked_s, check_s
        self._receive = receive
        self._send = send
        # What the client calls the request; empty if it does not, or not in a form that can be used.
        self.client_request_id = clients_name(self.header("x-request-id"))
        # Gives back what the budget of bodies holds for this one.
        self.release_body: Callable[[], None] = lambda: None
        self._complete = False
        # A body that `json_body` gives next.
        self._peeked: bytes | None = None
        # That of the stream, once it has begun.
        self._stream: StreamForm | None = None
        # What its next frames begin with: something behind a ping alone.
        self._before_next = b""

    def header(self, name: str) -> str:
        """A request header by its lower-case name; empty if absent."""
        wanted = name.encode()
        for key, value in self._headers:
            if key == wanted:
                return value.decode("latin-1")
        return ""

    def query(self, name: str) -> str:
        """The last value of a parameter in the address; empty if absent."""
        return parse_qs(self._query.decode("latin-1")).get(name, [""])[-1]

    async def json_body(self, limits: BodyLimits, more_kinds: Collection[str] = ()) -> bytes:
        """The body of a JSON request, which the budget holds until `release_body`. `more_kinds`: media types that are
        taken beside JSON. Raises BodyTooLarge, WrongMediaType, TooSlow, Unavailable (the budget), or Cancelled if the
        client left.
        """
        if self._peeked is not None:
            body, self._peeked = self._peeked, None
            return body
        kind = self.header("content-type").partition(";")[0].strip().lower()
        is_json = not kind or kind == "application/json" or kind.endswith("+json")
        # What `curl -d` says of each body. Pages of other origins can send it without asking, and then say theirs.
        may_be = kind == "application/x-www-form-urlencoded" and not self.header("origin")
        if not (is_json or may_be) and kind not in more_kinds:
            raise _no_json(kind)
        if self.header("content-encoding").lower() not in ("", "identity"):
            raise WrongMediaType("UNSUPPORTED_MEDIA_TYPE", "the body must not be compressed")
        body = await self._read(limits)
        if may_be and not body.lstrip().startswith(b"{"):
            raise _no_json(kind)
        return body

    async def peek_json(self, limits: BodyLimits) -> bytes:
        """The same, and `json_body` gives it once more."""
        self._peeked = await self.json_body(limits)
        return self._peeked

    async def body_pieces(self, most_bytes: int, silence_s: float) -> AsyncIterator[bytes]:
        """Yields the body as it comes, of at most so many bytes, with no longer time without a byte. What is not read
        waits at the client. Raises BodyTooLarge, TooSlow, or Cancelled if the client left.
        """
        declared = self.header("content-length")
        if declared.isdigit() and int(declared) > most_bytes:
            await self._refuse_size(most_bytes)
        loop = asyncio.get_running_loop()
        began = loop.time()
        size = 0
        while True:
            latest = began + _BODY_LEAST_S + size / _BODY_LEAST_BYTES_PER_S
            message = await self._received(silence_s)
            if message is None or loop.time() > latest:
                raise TooSlow(
                    "BODY_TIMEOUT",
                    f"of the body {size} bytes came in {loop.time() - began:.0f} s: send without pauses"
                    f" of {silence_s:g} s (--request-body-timeout), and faster than"
                    f" {_BODY_LEAST_BYTES_PER_S} bytes a second",
                )
            if message["type"] == "http.disconnect":
                raise Cancelled("CLIENT_GONE", "the client left before its request was complete")
            piece = message.get("body", b"")
            size += len(piece)
            if size > most_bytes:
                await self._discard(most_bytes)
                raise _too_large(most_bytes)
            yield piece
            if not message.get("more_body"):
                return

    async def _read(self, limits: BodyLimits) -> bytes:
        pieces: list[bytes] = []
        size = 0

        def release() -> None:
            nonlocal size
            limits.budget.give_back(size)
            size = 0

        self.release_body = release
        async for piece in self.body_pieces(limits.most_bytes, limits.silence_s):
            try:
                limits.budget.take(len(piece))
            except Unavailable:
                pieces.clear()
                release()
                await self._discard(limits.most_bytes)
                raise
            size += len(piece)
            pieces.append(piece)
        return await _joined(pieces, size)

    async def _received(self, within_s: float) -> Message | None:
        """The next message; None if there is none for so long. Second by second: where this process is late itself,
        what has arrived meanwhile is read before the next one is counted.
        """
        waited_s = 0.0
        while waited_s < within_s:
            try:
                async with asyncio.timeout(_SECOND_S):
                    return await self._receive()
            except TimeoutError:
                waited_s += _SECOND_S
        return None

    async def _refuse_size(self, limit: int) -> NoReturn:
        """Raises BodyTooLarge. Of the body some is read before, unless the client waits for `100 Continue`."""
        if not self.header("expect"):
            await self._discard(limit)
        raise _too_large(limit)

    async def _discard(self, limit: int) -> None:
        """Reads on for a moment: to close on a client that is still sending resets its connection,
        and it never sees the answer.
        """
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while size < limit:
                    message = await self._receive()
                    size += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return

    async def respond(
        self,
        status: int,
        body: bytes,
        kind: bytes = JSON,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        """A whole response."""
        self.started = self._complete = True
        self.response_bytes = len(body)
        await self._send(
            self._start(status, kind, [(b"content-length", b"%d" % len(body))], headers)
        )
        await self._send({"type": "http.response.body", "body": body})

    async def respond_in_pieces(self, pieces: AsyncIterator[bytes], kind: bytes = JSON) -> None:
        """A whole response. A small one has its length in its head; of a larger one each piece is asked for when the
        client has read those before.
        """
        first: list[bytes] = []
        size = 0
        async with contextlib.aclosing(pieces) as given:  # type: ignore[type-var]
            async for piece in given:
                if self.started:
                    await self._write(piece)
                    continue
                first.append(piece)
                size += len(piece)
                if size > _SMALL:
                    self.started = True
                    await self._send(self._start(200, kind, [], None))
                    await self._write(b"".join(first))
        if not self.started:
            await self.respond(200, b"".join(first), kind)
            return
        self._complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply(self, content: msgspec.Struct) -> None:
        """A whole response, as JSON."""
        await self.respond(200, msgspec.json.encode(content))

    async def fail(self, error: ServingError) -> None:
        """A whole response that is an error. What is left unread of the body ends the connection."""
        self.reason = error.reason
        reply = self.form.error(error)
        headers = error_headers(error, self.form)
        if isinstance(error, BodyTooLarge | TooSlow) or error.reason == "TOO_MANY_BODIES":
            headers.append((b"connection", b"close"))
        await self.respond(reply.status, reply.body, reply.media_type, headers)

    async def start_stream(self, form: StreamForm) -> None:
        """The head of a stream."""
        self.started = True
        self._stream = form
        # Proxies such as nginx would collect frames otherwise.
        extra = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send(self._start(200, form.media_type, extra, None))

    async def write(self, chunk: bytes) -> None:
        """More of a stream: whole frames. Waits while the client does not read."""
        await self._write(self._outgoing(chunk))

    async def ping(self) -> None:
        """Tells client and proxies that the stream goes on, where its form has something for it."""
        assert self._stream is not None, "no stream has begun"
        if self._stream.ping:
            self._before_next = self._stream.after_ping
            await self._write(self._stream.ping)

    async def fail_stream(self, error: ServingError) -> None:
        """The end of a stream, after frames with an error. A whole response that has begun breaks off: uvicorn
        closes the connection of one that is not complete.
        """
        if self._stream is not None:
            await self.end_stream(self._stream.failure(error))

    async def end_stream(self, chunk: bytes = b"") -> None:
        """The end of a stream, after one last chunk."""
        self._complete = True
        chunk = self._outgoing(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def _write(self, chunk: bytes) -> None:
        self.blocked_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self.blocked_since = 0.0

    def _outgoing(self, chunk: bytes) -> bytes:
        if not chunk.isascii():
            for raw, escaped in _LINE_ENDS:
                chunk = chunk.replace(raw, escaped)
        if not self._before_next:
            return chunk
        chunk = self._before_next + chunk
        self._before_next = b""
        return chunk

    @contextlib.asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Raises Cancelled inside the block as soon as the client leaves. Entered when the body has
        been read.
        """
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def leave() -> None:
            nonlocal gone
            if not self._complete and not gone:
                gone = True
                task.cancel()

        closed = asyncio.create_task(self._closed_or_blocked())
        closed.add_done_callback(lambda done: None if done.cancelled() else leave())
        try:
            yield
        except asyncio.CancelledError:
            if not gone or task.uncancel() > 0:
                raise
            raise Cancelled("CLIENT_GONE", "the client left") from None
        finally:
            gone = True  # from here on the client's leaving changes nothing
            closed.cancel()

    async def _closed_or_blocked(self) -> None:
        """Returns when the client has left, or has not read anything for too long."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._check_s):
                    return await self._closed()
            if self.blocked_since and loop.time() - self.blocked_since > self._blocked_s:
                return

    async def _closed(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _start(
        self,
        status: int,
        kind: bytes,
        first: list[tuple[bytes, bytes]],
        more: list[tuple[bytes, bytes]] | None,
    ) -> Message:
        self.status = status
        name = (self.client_request_id or self.request_id).encode()
        # Anthropic's clients, which send their version wherever they call, read it under another name.
        names = (b"x-request-id", b"request-id") if self.header(_ANTHROPIC) else (b"x-request-id",)
        headers = [
            (b"content-type", kind),
            *((header, name) for header in names),
            (b"x-tessera-request-id", self.request_id.encode()),
            *self.common_headers,
            *first,
            *(more or ()),
        ]
        return {"type": "http.response.start", "status": status, "headers": headers}


async def _joined(pieces: list[bytes], size: int) -> bytes:
    """The pieces as one, and `pieces` empty."""

    def work() -> bytes:
        body = b"".join(pieces)
        pieces.clear()
        return body

    return await in_thread(work) if is_large(size) else work()


def _no_json(kind: str) -> WrongMediaType:
    return WrongMediaType(
        "UNSUPPORTED_MEDIA_TYPE", f"the body must be application/json, not {kind[:64]}"
    )


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge("BODY_TOO_LARGE", f"the body is larger than the limit of {limit} bytes")
