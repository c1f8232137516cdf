"""gRPC plumbing that is the same in every room: server, health, reflection, error mapping, channels, life cycle."""

import asyncio
import contextlib
import functools
import gc
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc
import grpc.aio
import structlog
import uvloop
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from shared import access, errors
from shared.errors import (
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServingError,
    Unavailable,
)
from shared.net import internal_token, reflection
from shared.net.heartbeat import Heartbeat
from shared.settings import diagnostics_folder
from shared.telemetry import diagnostics, request_names
from shared.telemetry import logs as telemetry

log = structlog.get_logger(__name__)

DOMAIN = "tessera"
MAX_MESSAGE_BYTES = 16 << 20

# Pings find a peer that is frozen or cut off while TCP still looks alive: the kernel acknowledges for a stopped
# process, so without the ping timeout every call to it waits for its whole deadline.
_KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_ONLY: list[tuple[str, Any]] = [
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]


def channel(address: str, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """Opens a channel to `host:port` or `unix:/path`. Connects at the first call."""
    opened = grpc.aio.insecure_channel(
        address,
        options=[
            *_KEEPALIVE,
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            # Names are resolved here and addresses are on loopback or in the cluster: never by a proxy.
            ("grpc.enable_http_proxy", 0),
        ],
    )
    return internal_token.with_token(opened)


class RoomServer:
    """The gRPC server of a room: up and NOT_SERVING at once, SERVING when the room says that it is ready.

    `async with RoomServer(listen) as server:` binds and starts; then the room loads, calls `add` for each of its
    services and `ready`. Leaving the block stops it: health says NOT_SERVING, calls in hand get `grace_s` to finish.
    """

    def __init__(
        self,
        listen: str,
        *,
        advertise: str = "",
        heartbeat: Path | None = None,
        credentials: grpc.ServerCredentials | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_connection_age_s: float | None = None,
        limits: Sequence[tuple[str, Any]] = (),
        gate: grpc.aio.ServerInterceptor | None = None,
        grace_s: float = 5.0,
        public: bool = False,
    ) -> None:
        """`heartbeat` is the socket on which the process tells how it is, beside this server. `limits` are gRPC's
        channel arguments; `gate` stands before every method. `public`: a door for clients, which has keys of its own
        and asks for no internal token.
        """
        options = [
            *_KEEPALIVE,
            *_SERVER_ONLY,
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
            _ErrorInterceptor(lambda: self._is_ready),
            *([gate] if gate else []),
        ]
        self.grpc = grpc.aio.server(interceptors=interceptors, options=options)
        self.address = ""
        self._listen = listen
        self._credentials = credentials
        self._advertise = advertise
        self._grace_s = grace_s
        self._public = public
        self._health = _Health()
        self._names: list[str] = [health.SERVICE_NAME, *reflection.NAMES]
        self._tells_ready: Callable[[], bool] = lambda: False
        self._heartbeat: Heartbeat | None = None
        if heartbeat is not None:
            self._heartbeat = Heartbeat(heartbeat, lambda: self._tells_ready())

    async def __aenter__(self) -> Self:
        """Binds and starts. Raises Unavailable if the address is taken or not ours."""
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
        self.address = self._advertise or self._bound_address(port)
        self._warn_if_open()
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
        register(servicer, _Started(self.grpc))  # type: ignore[arg-type]
        self._names.append(name)

    async def ready(self, *, also: Callable[[], bool] = lambda: True) -> None:
        """Says SERVING for the server and each of its services, and answers reflection. The heartbeat says ready
        while `also` holds.
        """
        reflection.enable(self._names, self.grpc)
        self._is_ready = True
        for name in ["", *self._names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._tell(also)

    async def not_ready(self) -> None:
        """Says NOT_SERVING, for a drain: calls are still answered."""
        for name in ["", *self._names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._tell(lambda: False)

    def _tell(self, is_ready: Callable[[], bool]) -> None:
        self._tells_ready = is_ready
        if self._heartbeat is not None:
            self._heartbeat.beat()

    def _warn_if_open(self) -> None:
        host = self._listen.rsplit(":", 1)[0]
        if self._public or internal_token.in_use() or host == "unix" or access.is_loopback(host):
            return
        log.warning(
            "whoever reaches this service may use it: give all services the same --internal-token-file",
            address=self.address,
        )

    def _bind(self) -> int:
        if self._credentials is None:
            return self.grpc.add_insecure_port(self._listen)
        return self.grpc.add_secure_port(self._listen, self._credentials)

    def _bound_address(self, port: int) -> str:
        if self._listen.startswith("unix:"):
            return self._listen
        host = self._listen.rsplit(":", 1)[0]
        if host in ("0.0.0.0", "[::]", "::", "*", ""):
            host = _own_host()
        return f"{host}:{port}"


class _Health(health.aio.HealthServicer):
    """The library's, with the method that it leaves out."""

    async def List(self, request: Any, context: Any) -> Any:
        """The status of every service, and of the server as a whole under the empty name."""
        found = self._server_status  # type: ignore[attr-defined]
        messages: Any = health_pb2  # its stubs do not know this method's either
        statuses = {
            name: messages.HealthCheckResponse(status=status) for name, status in found.items()
        }
        return messages.HealthListResponse(statuses=statuses)


class _Started:
    """A server that runs already takes generic handlers only; generated code offers another kind
    as well, which then is refused with a warning and does nothing.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, *_: Any) -> None:
        """The same methods again, by name: not needed."""


def _own_host() -> str:
    """Where others reach this machine or container, which listens on all of its addresses.

    The address of its own host name: Docker and Kubernetes write it into /etc/hosts, and a pod's
    name would mean nothing to other pods. Ordinary machines have a loopback address there; then it
    is the name.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return name
    return name if address.startswith("127.") else address


def run(
    main: Callable[[asyncio.Event], Awaitable[int | None]], token_file: Path | None = None
) -> NoReturn:
    """Runs a room until SIGTERM or SIGINT sets the event, then exits with what `main` returned.

    `token_file` holds the token that the rooms of the system ask of each other.

    A `ServingError` that `main` raises is logged as one line and exits with status 1, or with 2 where
    the room was told something wrong, so that starting it again would be of no use.
    """

    async def body() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(telemetry.on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        folder = diagnostics_folder()
        if folder is not None:
            diagnostics.answer_signals(folder)
        try:
            internal_token.use(token_file)
            return await main(stop) or 0
        except ServingError as error:
            log.error("cannot go on", reason=error.reason, error=error.message)
            return 2 if isinstance(error, InvalidRequest | NotFound) else 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(body())
    raise SystemExit(status)


def load_without_collecting() -> None:
    """Called before a room imports its libraries: what imports make lives on, and looking through it for garbage
    after every 700 objects is a tenth of the time that they take. `settle` ends this.
    """
    gc.disable()


def settle() -> None:
    """Called when a room has loaded: what is there now lives as long as the process and is not looked at again.

    What comes later dies by its reference counts, all but a few cycles: to look for those after every 700 objects
    costs a share of each step, and a pause that grows with the sequences in hand.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    gc.enable()


@contextlib.contextmanager
def calling(peer: str) -> Iterator[None]:
    """Translates the gRPC errors of calls made inside into our own; `peer` names who was called."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer) from error


# Our servers say in their own words what went wrong in them. Without those the call broke: a server may be dead.
_BROKEN_CALL = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> ServingError:
    """The `ServingError` that a server of ours raised, or the nearest one for a failure of the call itself."""
    number = errors.status_number(error.code())
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    for detail in status.details if status else []:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return errors.from_status_number(
                number, info.reason, error.details() or "", dict(info.metadata)
            )
    message = f"{peer}: {error.details() or error.code().name}"
    if error.code() in _BROKEN_CALL:
        return Unavailable("CALL_BROKEN", message)
    return errors.from_status_number(number, error.code().name, message, {})


def to_status(error: ServingError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, and RetryInfo or BadRequest where the error says so."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details: list[Any] = [info]
    if isinstance(error, Overloaded) and "retry_after_s" in error.metadata:
        delay = duration_pb2.Duration(seconds=int(error.metadata["retry_after_s"]))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if "field" in error.metadata:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.metadata["field"], description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    return status_pb2.Status(
        code=errors.status_number(error.status), message=error.message, details=packed
    )


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ServingError) -> NoReturn:
    status = rpc_status.to_status(to_status(error))
    context.set_trailing_metadata((*status.trailing_metadata, *request_names.metadata()))
    await context.abort(status.code, status.details)
    raise AssertionError("abort returns never")


def _as_serving_error(error: Exception) -> ServingError:
    if isinstance(error, ServingError):
        return error
    log.exception("unexpected error in a handler")
    return Internal("INTERNAL", f"internal error: {type(error).__name__}")


_HANDLERS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors of unary and streaming handlers alike, so that servicers need no try.

    Methods that are not known yet, while the room loads, are unavailable: who calls again will find them.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None if self._is_ready() else _STARTING
        streams = (handler.request_streaming, handler.response_streaming)
        inner = getattr(handler, _HANDLERS[streams])
        wrapped: Any = _streaming if handler.response_streaming else _unary
        factory = getattr(grpc, f"{_HANDLERS[streams]}_rpc_method_handler")
        if not (asyncio.iscoroutinefunction(inner) or _is_async_generator(inner)):
            return handler  # the libraries' own synchronous services map their errors themselves
        return factory(
            functools.partial(wrapped, inner),
            request_deserializer=_parser(handler),
            response_serializer=handler.response_serializer,
        )


def _parser(handler: Any) -> Callable[[bytes], Any] | None:
    """The handler's own, whose errors reach the handler: gRPC would log them with a traceback."""
    parse = handler.request_deserializer

    def parsed(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError:
            error = InvalidRequest("MALFORMED_MESSAGE", "the message is no protobuf of this method")
            if handler.request_streaming:
                raise error from None
            return error

    return parse and parsed


async def _refuse(requests: Any, context: Any) -> None:
    await _abort(context, Unavailable("STARTING", "this service is starting; retry in a moment"))


_STARTING: Any = grpc.stream_stream_rpc_method_handler(_refuse)


def _is_async_generator(function: Any) -> bool:
    return bool(getattr(getattr(function, "__code__", None), "co_flags", 0) & 0x200)


async def _unary(inner: Any, request: Any, context: Any) -> Any:
    request_names.bind_metadata(context.invocation_metadata())
    try:
        if isinstance(request, InvalidRequest):
            raise request
        return await inner(request, context)
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except Exception as error:
        await _abort(context, _as_serving_error(error))


async def _streaming(inner: Any, request: Any, context: Any) -> AsyncIterator[Any]:
    request_names.bind_metadata(context.invocation_metadata())
    try:
        if isinstance(request, InvalidRequest):
            raise request
        if _is_async_generator(inner):
            # A caller that leaves closes this generator, and with it the inner one: at once, not some day.
            async with contextlib.aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response
        else:  # a coroutine that writes to the context
            await inner(request, context)
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except Exception as error:
        await _abort(context, _as_serving_error(error))
