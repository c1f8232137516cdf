"""uvicorn's HTTP/1.1 protocol with limits on what a peer may do before its key has been checked: size and number of
headers, time for them, time for reading what it is sent, connections in all.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import httptools
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from services.gateway.errors import HeadTooLarge, InvalidHttp, TooSlow
from services.gateway.http.connection.closing import (
    AnswerTransport,
    HalfClosed,
    LingeringClose,
    UntilClose,
)
from services.gateway.http.connection.host_field import host_fault
from services.gateway.http.connection.upgrade import head_without_offer
from shared.errors import ServingError, Unavailable

log = structlog.get_logger(__name__)

# A line break and the separator of name and value.
_FIELD_EXTRA = 4
_MOST_PIPELINED = 16
# How long a connection that is being closed waits for a peer that does not read.
_LINGER_S = 30.0
_HTTP_1_0 = "1.0"
_LINE_BREAK = b"\r\n"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one connection may do, and how many there may be."""

    head_bytes: int
    head_fields: int
    head_s: float
    keep_alive_s: int
    connections: int


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Subclassed with its `limits`, and with what makes the whole response to a refused request, whose
    path is empty where it is not known.
    """

    limits: HttpLimits
    refusal: Callable[[str, ServingError], bytes]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: Any = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._refusal: ServingError | None = None
        # A head is awaited from the connection's begin, later from its first byte on.
        self._awaits_head = True
        self._in_message = False
        # Seconds of waiting: for the head, for the end of a body that is not read, for the peer to read what was sent,
        # for another request.
        self._waited_s = 0.0
        self._head_bytes = 0
        self._head_fields = 0
        # The address of the request that is being received, as far as it has come.
        self._address = b""
        # Bytes of a field that is not complete: the parser keeps them to itself.
        self._unparsed = 0
        # What is left to be sent after the end.
        self._unsent = -1
        # The answer that is being made; `cycle` is that of the request that came last.
        self._running: RequestResponseCycle | None = None
        self._lingering: LingeringClose | None = None
        self._half_closed: HalfClosed | None = None

    def connection_made(self, transport: Any) -> None:
        """Refuses it where there are too many already."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(
                Unavailable(
                    "TOO_MANY_CONNECTIONS",
                    f"this gateway has its {self.limits.connections} connections"
                    " (--max-connections): retry in a moment",
                ),
                lingers=False,
            )

    def has_waited(self, seconds: float) -> None:
        """Of the time for the first head, so much went before the connection was made."""
        if self._awaits_head:
            self._waited_s += seconds

    def data_received(self, data: bytes) -> None:
        """Reads on, unless the peer was refused."""
        if self._lingering is not None:
            self._lingering.received()
        if self._refusal is not None or self._lingering is not None:
            return
        # A line break before a request is allowed, and begins none.
        if not self._in_message and not self._awaits_head and data.strip(_LINE_BREAK):
            self._awaits_head, self._waited_s = True, 0.0
        self._unparsed += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._refusal is None and self._head_bytes + self._unparsed > self.limits.head_bytes:
            self._refuse(self._too_large())

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError:
                self.send_400_response("")
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._repeat_without_offer() + data[offer.args[0] :]

    def _repeat_without_offer(self) -> bytes:
        """The head of the request that was read last, for a new parser."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._head_bytes = self._head_fields = self._unparsed = 0
        return head_without_offer(method, self.url, version, self.headers)

    def on_message_begin(self) -> None:
        """The first byte of a head, maybe in one piece with requests before it."""
        super().on_message_begin()
        self._address = b""
        self._awaits_head, self._waited_s = True, 0.0
        self._unparsed = max(self._unparsed, 1)

    def on_url(self, url: bytes) -> None:
        """A piece of the address."""
        super().on_url(url)
        self._address += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or behind a body in pieces."""
        self._head_fields += 1
        self._count(len(name) + len(value) + _FIELD_EXTRA)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there. Raises InvalidHttp, which stops the parser."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop(InvalidHttp("INVALID_HTTP", "CONNECT is not served: this is no proxy"))
            return  # it is read again, see `_parse`
        self._awaits_head = False
        self._waited_s = 0.0
        self._unparsed = 0
        if len(self.pipeline) >= _MOST_PIPELINED:
            self._stop(
                InvalidHttp(
                    "TOO_MANY_REQUESTS_AT_ONCE",
                    f"at most {_MOST_PIPELINED} requests may come before the answers to those before them: wait for"
                    " these, and send this one and what follows again",
                )
            )
        if fault := host_fault(self.parser.get_http_version(), self.headers):
            self._stop(InvalidHttp("INVALID_HTTP", fault))
        super().on_headers_complete()  # raises what is wrong with the address
        self._in_message = True
        self.cycle.transport = cast(
            asyncio.Transport, AnswerTransport(self.transport, self._close_behind_answer)
        )

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next is a new head."""
        if self.parser.should_upgrade():
            return
        self._in_message = False
        self._address = b""
        self._waited_s = 0.0
        self._head_bytes = self._head_fields = self._unparsed = 0
        super().on_message_complete()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The peer sends no more. True where it may wait for answers, which keeps the connection open."""
        if self._lingering is not None or self.scheme == "https":
            return None  # asyncio has no half-closed connections of TLS
        if self._in_message:  # of this one there will be no more
            self._refuse(InvalidHttp("INVALID_HTTP", "the request ended before its body was whole"))
        if self.transport.is_closing() or not self._owes_answers():
            return None
        if self._refusal is None:  # which else closes it, behind the answers
            self.cycle.keep_alive = False
        if self._half_closed is None:
            answer, version = self._running, self.cycle.scope["http_version"]
            begun = answer is None or answer.response_started
            self._half_closed = HalfClosed(
                self.transport, self.loop, may_interrupt=not begun and version != _HTTP_1_0
            )
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._unset_keepalive_if_required()
        if self._lingering is not None:
            self._lingering.close()
        if self._running is not None and self._running is not self.cycle:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The next one is made, or the connection ends with what was refused."""
        self._running = None
        if self._lingering is not None:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._refusal is not None and not self._owes_answers():
            self._answer_refusal(self._refusal)

    def shutdown(self) -> None:
        """The server is about to end."""
        if self._lingering is not None:
            self._lingering.close()
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """The parser has given up, or a limit has stopped it."""
        self._refuse(self._refusal or InvalidHttp("INVALID_HTTP", "this is no valid HTTP request"))

    def look(self, seconds: float) -> None:
        """Called every second or so, with the time since the last call: ends a connection that is late. The time is
        short where this process itself was late, so that what has arrived meanwhile can be read.
        """
        self._waited_s += seconds
        if self._half_closed is not None:
            self._half_closed.look()
        if self.transport.is_closing():
            left = self.transport.get_write_buffer_size()
            if left != self._unsent:
                self._unsent, self._waited_s = left, 0.0
            elif self._waited_s > _LINGER_S:
                self.transport.abort()
        elif self.flow.read_paused:  # what it waits for may have come
            self._waited_s = 0.0
        elif self._awaits_head:
            if self._waited_s > self.limits.head_s:
                self._end_late_head()
        elif self._owes_answers() or self._lingering is not None:
            self._waited_s = 0.0
        elif self._waited_s > self._idle_limit_s():
            self.transport.close()

    def _idle_limit_s(self) -> float:
        """How long a connection stays without an answer that is due: while the rest of a body comes that is not read,
        and for the next request. uvicorn's own timer for that does not begin again once anything has come.
        """
        return self.limits.head_s if self._in_message else self.limits.keep_alive_s

    def _end_late_head(self) -> None:
        if self._head_bytes or self._unparsed:
            self._refuse(TooSlow("HEADERS_TIMEOUT", _late(self.limits.head_s)))
        else:  # no request has begun: there is nothing to answer
            self.transport.close()

    def _count(self, size: int) -> None:
        self._unparsed = 0
        self._head_bytes += size
        if self._head_bytes > self.limits.head_bytes or self._head_fields > self.limits.head_fields:
            self._stop(self._too_large())

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            "HEADERS_TOO_LARGE",
            f"address and headers may have {self.limits.head_bytes} bytes (--max-header-bytes) and"
            f" {self.limits.head_fields} fields (--max-header-count) together",
        )

    def _stop(self, error: ServingError) -> None:
        """Stops the parser, which then calls `send_400_response`."""
        self._refusal = error
        raise error

    def _refuse(self, error: ServingError, *, lingers: bool = True) -> None:
        """Sends an error as the last response, behind those that are owed, and closes."""
        self._refusal = error
        self._awaits_head = False
        if self.transport.is_closing():
            return
        log.debug("a connection was refused", reason=error.reason, peer=self.client)
        if self._in_message and not self._forget_message():
            self.transport.close()
        elif not self._owes_answers():
            self._answer_refusal(error, lingers=lingers)

    def _answer_refusal(self, error: ServingError, *, lingers: bool = True) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.transport.write(self.refusal(_path(self._address), error))
        if lingers:
            self._lingering = LingeringClose(self.transport, self.loop)
        else:
            self.transport.close()

    def _owes_answers(self) -> bool:
        """Whether there are requests, wholly received or not, whose answers are not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _forget_message(self) -> bool:
        """Gives up the request whose body is being received: there will be no more of it. False where its answer has
        begun.
        """
        self._in_message = False
        last = self.cycle
        if last is None or last.response_complete:
            return True
        if last is self._running:
            if last.response_started:
                return False
            self._running = None
            last.disconnected = True
            last.message_event.set()
        else:
            self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else cast(Any, self._running)
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == _HTTP_1_0:
            app = UntilClose(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _close_behind_answer(self) -> None:
        """An answer was the last one."""
        if self._in_message or self.pipeline:
            self.flow.resume_reading()
            self._lingering = LingeringClose(self.transport, self.loop)
        else:
            self.transport.close()


def _late(limit_s: float) -> str:
    return f"the headers did not arrive within {limit_s:g} s (--request-header-timeout)"


def _path(address: bytes) -> str:
    """The path of an address as a request has it; empty for one without."""
    try:
        found = httptools.parse_url(address).path if address else None
    except httptools.HttpParserInvalidURLError:
        found = None
    return unquote((found or b"").decode("latin-1")).rstrip("/")
