"""Accepts connections for TLS. asyncio's own server begins a handshake with each at once and tells nobody before it is
done; here a connection counts from the beginning, takes no memory of TLS before its first byte, and its handshake is
part of the time for the first head.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

import structlog

from services.gateway.http.connection.protocol import BoundedProtocol, HttpLimits

log = structlog.get_logger(__name__)

_MOST_AT_ONCE = 100  # that are accepted before others have their turn
_PAUSE_S = 1.0
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LEAST_S = 0.1


class TlsListener:
    """Like `asyncio.Server`: accepts until it is closed."""

    def __init__(
        self,
        listening: socket.socket,
        tls: ssl.SSLContext,
        limits: HttpLimits,
        make_protocol: Callable[[], BoundedProtocol],
        established: Callable[[], int],
    ) -> None:
        """`established` is how many connections there are that are past the handshake."""
        self._listening = listening
        self._tls = tls
        self._limits = limits
        self._make_protocol = make_protocol
        self._established = established
        self._loop = asyncio.get_running_loop()
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._paused: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stops accepting, and ends what is no connection yet."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listening)
        for connection in list(self._silent):
            self._forget(connection)
            connection.close()
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits for what `close` has begun."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                log.error("no connection can be accepted", error=str(error))
                self._loop.remove_reader(self._listening)
                self._paused = self._loop.call_later(_PAUSE_S, self._resume)
                return
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        """A new connection. One too many is closed: an answer in clear would mean nothing to it."""
        waiting = len(self._silent) + len(self._handshakes)
        if self._established() + waiting >= self._limits.connections:
            log.debug("a connection was refused", reason="TOO_MANY_CONNECTIONS")
            connection.close()
            return
        connection.setblocking(False)
        began = self._loop.time()
        self._silent[connection] = self._loop.call_later(
            self._limits.head_s, self._too_late, connection
        )
        self._loop.add_reader(connection, self._begin, connection, began)

    def _too_late(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _begin(self, connection: socket.socket, began: float) -> None:
        """Its first byte is there, or its end."""
        self._forget(connection)
        task = self._loop.create_task(self._shake_hands(connection, began))
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done))

    async def _shake_hands(self, connection: socket.socket, began: float) -> None:
        left = self._limits.head_s - (self._loop.time() - began)
        protocol = self._make_protocol()
        # What fails here is the peer's fault; there is nobody to tell.
        with contextlib.suppress(OSError):
            try:
                await self._loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=self._tls,
                    ssl_handshake_timeout=max(left, _LEAST_S),
                )
            except BaseException:
                connection.close()
                raise
            protocol.has_waited(self._loop.time() - began)

    def _forget(self, connection: socket.socket) -> None:
        self._loop.remove_reader(connection)
        self._silent.pop(connection).cancel()
