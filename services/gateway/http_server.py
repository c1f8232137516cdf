"""uvicorn inside our own event loop: bound before the model is loaded, started when the gateway can
answer.
"""

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn

from services.gateway.app import App
from shared.errors import Unavailable

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_TICK_S = 1.0


class _Server(uvicorn.Server):
    """Leaves signals to the process it runs in, and sleeps until it is told to stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        # Each tick with 0 renews the date header.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.stopping.wait()


class HttpServer:
    """A listening socket, and the server on it. Connections that come before `start` wait in the
    backlog.
    """

    def __init__(self, host: str, port: int, shutdown_timeout_s: float) -> None:
        """Binds. Raises Unavailable if the address is taken or not ours."""
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
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(self._shutdown_timeout_s),
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Stops accepting, lets open answers run for the shutdown timeout, then closes them."""
        if self._server is None or self._task is None:
            return
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        self._server.should_exit = True
        self._server.stopping.set()
        await self._task

    def unbind(self) -> None:
        """Closes the socket."""
        self._socket.close()
