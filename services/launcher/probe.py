"""Asks a child how it is: gRPC health, the gateway's readiness page, Redis' PING."""

import asyncio
import enum
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared import rpc

_TIMEOUT_S = 1.0


class Condition(enum.Enum):
    """What a probe found."""

    SILENT = "silent"  # no answer: not up yet, hung, or gone
    ALIVE = "alive"  # answers, and says that it is not ready
    READY = "ready"


class Probe(Protocol):
    """One way of asking; never raises."""

    async def ask(self) -> Condition:
        """Asks once; an answer that takes over a second is none."""
        ...

    async def close(self) -> None:
        """Lets go of the connection."""
        ...


class GrpcProbe:
    """The standard health service of a room: `unix:/path` or `host:port`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    async def ask(self) -> Condition:
        """SERVING is ready; any other answer is alive."""
        if self._channel is None:
            if self._address.startswith("unix:") and not Path(self._address[5:]).exists():
                return Condition.SILENT  # a call now would only make the channel wait longer
            self._channel = rpc.channel(self._address)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            away = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return Condition.SILENT if error.code() in away else Condition.ALIVE
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return Condition.READY if serving else Condition.ALIVE

    async def close(self) -> None:
        """Closes the channel; the next question opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class HttpProbe:
    """A page that answers 200 when ready, anything else when alive."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self._host, self._port, self._path = host, port, path

    async def ask(self) -> Condition:
        """One HTTP/1.1 request on a connection of its own."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status = await self._status()
        except (OSError, TimeoutError, ValueError):
            return Condition.SILENT
        return Condition.READY if status == 200 else Condition.ALIVE

    async def _status(self) -> int:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            # Where nobody listens a socket may connect to itself, and then keep the gateway from its port.
            if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):
                raise ConnectionRefusedError
            request = (
                f"GET {self._path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n\r\n"
            )
            writer.write(request.encode())
            line = await reader.readline()
            return int(line.split()[1]) if len(line.split()) > 1 else 0
        finally:
            writer.close()

    async def close(self) -> None:
        """Nothing is held."""


class RedisProbe:
    """PING on a unix socket; loading its file is alive."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path

    async def ask(self) -> Condition:
        """+PONG is ready."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(self._path))
                try:
                    writer.write(b"PING\r\n")
                    answer = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return Condition.SILENT
        if not answer:
            return Condition.SILENT
        return Condition.READY if answer.startswith(b"+PONG") else Condition.ALIVE

    async def close(self) -> None:
        """Nothing is held."""
