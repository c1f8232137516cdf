"""uvicorn's HTTP/1.1 protocol with limits on what a peer may do before its key has been checked: size and number of
headers, time for them, time for reading what it is sent, connections in all.
"""

from dataclasses import dataclass
from typing import Any

import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from services.gateway.http.errors import (
    HeadTooLarge,
    InvalidHttp,
    TooSlow,
    error_body,
    error_headers,
)
from shared.errors import ServingError, Unavailable

log = structlog.get_logger(__name__)

# A line break and the separator of name and value.
_FIELD_EXTRA = 4
_MOST_PIPELINED = 16
# How long a connection that is being closed waits for a peer that does not read.
_LINGER_S = 30.0
_DISCARD_S = 1.0


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one connection may do, and how many there may be."""

    head_bytes: int
    head_fields: int
    head_s: float
    keep_alive_s: int
    connections: int


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Subclassed with its `limits`."""

    limits: HttpLimits

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
        # Seconds of waiting: for the head, for the end of a body that is not read, for the peer to read what was sent.
        self._waited_s = 0.0
        self._head_bytes = 0
        self._head_fields = 0
        # Bytes of a field that is not complete: the parser keeps them to itself.
        self._unparsed = 0
        # What is left to be sent after the end.
        self._unsent = -1

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
                discard_s=0.0,
            )

    def data_received(self, data: bytes) -> None:
        """Reads on, unless the peer was refused."""
        if self._refusal is not None:
            return
        if not self._in_message and not self._awaits_head:
            self._awaits_head, self._waited_s = True, 0.0
        self._unparsed += len(data)
        super().data_received(data)
        if self._refusal is None and self._head_bytes + self._unparsed > self.limits.head_bytes:
            self._refuse(self._too_large())

    def on_url(self, url: bytes) -> None:
        """A piece of the address."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or behind a body in pieces."""
        self._head_fields += 1
        self._count(len(name) + len(value) + _FIELD_EXTRA)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._awaits_head, self._in_message = False, True
        self._waited_s = 0.0
        self._unparsed = 0
        if len(self.pipeline) >= _MOST_PIPELINED:
            self._stop(
                InvalidHttp("TOO_MANY_REQUESTS_AT_ONCE", "wait for answers before asking on")
            )
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next is a new head."""
        self._in_message = False
        self._head_bytes = self._head_fields = self._unparsed = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser has given up, or a limit has stopped it."""
        self._refuse(self._refusal or InvalidHttp("INVALID_HTTP", "this is no valid HTTP request"))

    def look(self, seconds: float) -> None:
        """Called every second or so, with the time since the last call: ends a connection that is late. The time is
        short where this process itself was late, so that what has arrived meanwhile can be read.
        """
        self._waited_s += seconds
        if self.transport.is_closing():
            left = self.transport.get_write_buffer_size()
            if left != self._unsent:
                self._unsent, self._waited_s = left, 0.0
            elif self._waited_s > _LINGER_S:
                self.transport.abort()
        elif self._awaits_head:
            if self._waited_s > self.limits.head_s:
                self._end_late_head()
        elif not self._in_message or not self.cycle.response_complete:
            self._waited_s = 0.0
        elif self._waited_s > self.limits.head_s:  # the unread rest of a body keeps coming
            self.transport.close()

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

    def _refuse(self, error: ServingError, discard_s: float = _DISCARD_S) -> None:
        """Sends an error as the last response and closes, unless another response is being sent."""
        self._refusal = error
        self._awaits_head = False
        if self.transport.is_closing():
            return
        log.debug("a connection was refused", reason=error.reason, peer=self.client)
        if self._may_answer():
            self.transport.write(_reply(error))
            if discard_s and self.transport.can_write_eof():
                # To close on a peer that is still sending resets the connection, and it never sees the answer.
                self.transport.write_eof()
                self.loop.call_later(discard_s, self.transport.close)
                return
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether nothing is being answered; a request whose body was on its way is over then."""
        if self.cycle is None or self.cycle.response_complete:
            return True
        if self.cycle.response_started or self.pipeline:
            return False
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        return True


def _late(limit_s: float) -> str:
    return f"the headers did not arrive within {limit_s:g} s (--request-header-timeout)"


def _reply(error: ServingError) -> bytes:
    body = error_body(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *error_headers(error),
    ]
    lines = [b"%s: %s\r\n" % header for header in headers]
    return b"".join([STATUS_LINE[error.http_status], *lines, b"\r\n", body])
