"""The gRPC server of a service: address, health, reflection, error mapping, limits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shared import access
from shared.errors import InvalidRequest, Unavailable
from shared.net import internal_token, own_address, transport
from shared.net.channels import KEEPALIVE, MAX_MESSAGE_BYTES
from shared.net.heartbeat import Heartbeat
from shared.net.rpc import reflection
from shared.net.rpc.error_interceptor import ErrorInterceptor

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]


class RpcServer:
    """The gRPC server of a service: NOT_SERVING from the start, SERVING once `ready` is called.

    `async with RpcServer(listen) as server:` binds and starts; then the service loads, calls `add` for each servicer
    and `ready`. Leaving the block stops it: health says NOT_SERVING, calls under way get `grace_s` to finish.
    """

    def __init__(
        self,
        listen: str,
        *,
        advertise: str = "",
        redis_url: str = "",
        heartbeat: Path | None = None,
        credentials: grpc.ServerCredentials | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_connection_age_s: float | None = None,
        limits: Sequence[tuple[str, Any]] = (),
        gate: grpc.aio.ServerInterceptor | None = None,
        grace_s: float = 5.0,
        public: bool = False,
    ) -> None:
        """A server that listens on every address announces `advertise`, else its own address on the route to Redis; the
        one that it listens on without `redis_url`, where nobody is told it. `heartbeat` is the socket on which a
        thread reports the process's state. `limits` are gRPC channel arguments; `gate` intercepts every call.
        `public`: for clients, which have API keys instead of the internal token.
        """
        options = [
            *KEEPALIVE,
            *_OPTIONS,
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            *limits,
        ]
        if max_connection_age_s is not None:
            # Clients resolve names again when a connection ends: this is how they find new replicas.
            options.append(("grpc.max_connection_age_ms", int(max_connection_age_s * 1000)))
            options.append(("grpc.max_connection_age_grace_ms", 60_000))
        self._is_ready = False
        guards = [] if public else internal_token.guards()
        interceptors = [
            *guards,
            ErrorInterceptor(lambda: self._is_ready),
            *([gate] if gate else []),
        ]
        self.grpc = transport.server(interceptors=interceptors, options=options)
        self.address = ""
        self._listen = listen
        self._credentials = credentials
        self._advertise = advertise
        self._redis_url = redis_url
        self._grace_s = grace_s
        self._public = public
        self._health = _Health()
        self._names: list[str] = [health.SERVICE_NAME, *reflection.NAMES]
        self._reports_ready: Callable[[], bool] = lambda: False
        self._heartbeat: Heartbeat | None = None
        if heartbeat is not None:
            self._heartbeat = Heartbeat(heartbeat, lambda: self._reports_ready())

    async def __aenter__(self) -> Self:
        """Binds and starts.

        Raises InvalidRequest where other machines could reach it and there is no token, Unavailable if the address is
        taken or not this machine's, or the address to announce cannot be found out.
        """
        self._require_token_or_loopback()
        if self._heartbeat is not None:
            try:
                self._heartbeat.start()
            except OSError as error:
                raise Unavailable("ADDRESS_IN_USE", f"cannot bind --heartbeat: {error}") from error
        try:
            port = self._bind()
        except RuntimeError as error:
            raise Unavailable(
                "ADDRESS_IN_USE", f"cannot listen on {self._listen}: {error}"
            ) from error
        self.address = self._advertise or await self._bound_address(port)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.grpc.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(self._grace_s)
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def add(
        self, name: str, register: Callable[[Any, grpc.aio.Server], None], servicer: Any
    ) -> None:
        """Serves `servicer` under its full proto name; `register` is the generated function."""
        register(servicer, _GenericHandlersOnly(self.grpc))  # type: ignore[arg-type]
        self._names.append(name)

    async def ready(self, *, also: Callable[[], bool] = lambda: True) -> None:
        """Reports SERVING for the server and each of its services, and answers reflection. The heartbeat reports
        ready while `also` holds.
        """
        reflection.enable(self._names, self.grpc)
        self._is_ready = True
        for name in ["", *self._names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._report(also)

    async def not_ready(self) -> None:
        """Reports NOT_SERVING, for a drain: calls are still answered."""
        for name in ["", *self._names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._report(lambda: False)

    def _report(self, is_ready: Callable[[], bool]) -> None:
        self._reports_ready = is_ready
        if self._heartbeat is not None:
            self._heartbeat.beat()

    def _require_token_or_loopback(self) -> None:
        host = self._listen.rsplit(":", 1)[0]
        is_local = self._listen.startswith("unix:") or access.is_loopback(host)
        if self._public or internal_token.in_use() or is_local:
            return
        raise InvalidRequest(
            "NO_INTERNAL_TOKEN",
            f"no internal token is set, and {self._listen} can be reached from other machines, by anybody: give all"
            " services the same --internal-token-file (TESSERA_INTERNAL_TOKEN_FILE), made by `openssl rand -hex 32`,"
            " or listen on loopback or a unix socket",
            field="listen",
        )

    def _bind(self) -> int:
        if self._credentials is None:
            return self.grpc.add_insecure_port(self._listen)
        return self.grpc.add_secure_port(self._listen, self._credentials)

    async def _bound_address(self, port: int) -> str:
        if self._listen.startswith("unix:"):
            return self._listen
        host = self._listen.rsplit(":", 1)[0]
        if self._redis_url and own_address.is_every_address(host):
            host = await own_address.address_toward(self._redis_url)
        return f"{host}:{port}"


class _Health(health.aio.HealthServicer):
    """The library's servicer with the method `List`, which it lacks."""

    async def List(self, request: Any, context: Any) -> Any:
        """The status of every service, and of the server as a whole under the empty name."""
        found = self._server_status  # type: ignore[attr-defined]
        messages: Any = health_pb2  # its stubs do not know this method's either
        statuses = {
            name: messages.HealthCheckResponse(status=status) for name, status in found.items()
        }
        return messages.HealthListResponse(statuses=statuses)


class _GenericHandlersOnly:
    """A running server takes generic handlers only; the other kind that generated code registers as well would be
    refused with a warning.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, *_: Any) -> None:
        """The same methods again, by name: not needed."""
