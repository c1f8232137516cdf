"""uvicorn inside our own event loop: bound before the model is loaded, started when the gateway can
answer.
"""

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn

from services.gateway.http.app import App
from services.gateway.http.connection.protocol import BoundedProtocol, HttpLimits
from services.gateway.http.connection.tls_listener import TlsListener
from shared.environment import monotonic
from shared.errors import Unavailable
from shared.net.server_tls import ServerTls

_BACKLOG = 2048
_TICK_S = 1.0


class _Server(uvicorn.Server):
    """Leaves signals to the process that it runs in, and sleeps until `stopping` is set."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()
        self.tls_listeners: list[TlsListener] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts; connections with TLS by a listener of our own, as uvicorn has no say over handshakes."""
        if not self.config.is_ssl:
            await super().startup(sockets)
            return
        protocol = cast(type[BoundedProtocol], self.config.http_protocol_class)
        state, tls = self.server_state, self.config.ssl
        assert tls is not None
        self.tls_listeners = [
            TlsListener(
                listening,
                tls,
                protocol.limits,
                lambda: protocol(self.config, state, {}),
                lambda: len(state.connections),
            )
            for listening in sockets or []
        ]
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops as uvicorn does, with our listeners too."""
        for listener in self.tls_listeners:
            listener.close()
            await listener.wait_closed()
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        # Each tick with 0 renews the date header.
        looked_at = monotonic()
        while not await self.on_tick(0):
            now = monotonic()
            for connection in list(self.server_state.connections):
                cast(BoundedProtocol, connection).look(min(now - looked_at, 2 * _TICK_S))
            looked_at = now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.stopping.wait()


class HttpServer:
    """A listening socket, and the server on it. Connections that come before `start` wait in the
    backlog.
    """

    def __init__(
        self,
        host: str,
        port: int,
        shutdown_timeout_s: float,
        limits: HttpLimits,
        tls: ServerTls | None = None,
    ) -> None:
        """Binds. Raises Unavailable if the address is taken or not ours."""
        self._limits = limits
        self._tls = tls
        self._shutdown_timeout_s = shutdown_timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise Unavailable(
                "ADDRESS_IN_USE", f"cannot listen on {host}:{port}: {error}"
            ) from error
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port, also if any was asked for."""
        port: int = self._socket.getsockname()[1]
        return port

    def start(self, app: App) -> None:
        """Begins to answer."""
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http=type(
                "Protocol",
                (BoundedProtocol,),
                {"limits": self._limits, "refusal": staticmethod(app.refusal)},
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=self._limits.keep_alive_s,
            timeout_graceful_shutdown=math.ceil(self._shutdown_timeout_s),
            **(self._tls.uvicorn_options() if self._tls else {}),
        )
        logging.getLogger("uvicorn.error").addFilter(_is_worth_a_line)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def served(self) -> None:
        """Waits until it has stopped. Raises Unavailable unless it was told to."""
        assert self._server is not None and self._task is not None, "not started"
        await asyncio.wait([self._task])
        if not self._server.should_exit:
            failure = None if self._task.cancelled() else self._task.exception()
            raise Unavailable(
                "REST_SERVER_FAILED", f"the REST server has stopped serving: {failure!r}"
            )

    async def stop(self) -> None:
        """Stops accepting, lets open answers run for the shutdown timeout, then closes them."""
        if self._server is None or self._task is None:
            return
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        self._server.should_exit = True
        self._server.stopping.set()
        await asyncio.wait([self._task])

    def unbind(self) -> None:
        """Closes the socket."""
        self._socket.close()


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Keeps errors of ours: not those of clients, nor answers that a shutdown cuts off."""
    error = record.exc_info[1] if record.exc_info else None
    return record.levelno >= logging.ERROR and not isinstance(error, asyncio.CancelledError)
