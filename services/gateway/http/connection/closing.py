"""The end of a connection: closing it so that a peer which is still sending can read its answer, and telling a peer
that has only finished sending from one that has left.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

_SILENCE_S = 2.0
_LONGEST_S = 30.0
_LOOKS_S = (0.01, 0.05, 0.2)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7  # of enum tcp_state in Linux: the peer has reset the connection
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class LingeringClose:
    """Ends what is sent, and closes when the peer has stopped sending: to close on one that is still sending resets the
    connection, and it never sees what it was sent.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Begins at once."""
        self._transport = transport
        self._loop = loop
        if transport.can_write_eof():
            transport.write_eof()
        self._last = loop.call_later(_LONGEST_S, self.close)
        self._silence = loop.call_later(_SILENCE_S, self.close)

    def received(self) -> None:
        """The peer has sent something, which nobody reads."""
        self._silence.cancel()
        self._silence = self._loop.call_later(_SILENCE_S, self.close)

    def close(self) -> None:
        """Closes now."""
        self._silence.cancel()
        self._last.cancel()
        self._transport.close()


class AnswerTransport:
    """What an answer is written to: closing it is left to the connection."""

    def __init__(self, transport: Any, close: Callable[[], None]) -> None:
        self._transport = transport
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class HalfClosed:
    """A peer that has ended its side of the connection: it may be waiting for its answers, or gone.

    Only a peer that is gone resets the connection when something is sent to it. So it is sent an interim response where
    nothing else is on its way; HTTP/1.0 has none, there it takes the system a minute to find out.
    """

    def __init__(
        self, transport: Any, loop: asyncio.AbstractEventLoop, *, may_interrupt: bool
    ) -> None:
        """`may_interrupt`: an interim response may be sent now."""
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        if may_interrupt:
            transport.write(_CONTINUE)
        else:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _KEEPALIVE.items():
                    self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        for seconds in _LOOKS_S:
            loop.call_later(seconds, self.look)

    def look(self) -> None:
        """Ends the connection if the peer is gone: reading, which would tell, is over."""
        if self._transport.is_closing():
            return
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except OSError:
            self._transport.abort()
            return
        if struct.unpack("B", info) == (_TCP_CLOSE,):
            self._transport.abort()


class UntilClose:
    """An application's answers for HTTP/1.0, which knows no chunks: a body without a length ends with the connection.

    `answer` is uvicorn's `RequestResponseCycle`, which would write chunks where it finds no length.
    """

    def __init__(self, app: Any, answer: Any) -> None:
        self._app = app
        self._answer = answer
        self._has_length = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_unchunked(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._has_length = any(name == b"content-length" for name, _ in message["headers"])
                if not self._has_length:
                    self._answer.chunked_encoding = False
            elif not self._has_length:
                self._answer.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unchunked)
