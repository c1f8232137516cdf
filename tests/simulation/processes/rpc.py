"""gRPC over the simulated network: the generated stubs and servicers, our interceptor and the real messages in bytes;
only the transport is played.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio

from tests.simulation.processes.network import End, Network, Refused
from tests.simulation.virtual_loop import current_process

_OK, _CANCELLED, _UNAVAILABLE = (
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNAVAILABLE,
)


class _Status(NamedTuple):
    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[Any, ...] = ()


class _Details(NamedTuple):
    method: str
    invocation_metadata: tuple[Any, ...]


class SimulatedChannel:
    """What `grpc.aio.insecure_channel` gives. Each call is a connection of its own."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._calls: dict[_Call, None] = {}
        self._closed = False

    def _method(self, kind: "type[_Call]") -> Callable[..., Any]:
        def make(
            path: str,
            request_serializer: Any = None,
            response_deserializer: Any = None,
            _registered_method: bool = False,
        ) -> Callable[..., Any]:
            def start(request: Any = None, *, timeout: float | None = None, **more: Any) -> Any:
                metadata = tuple(more.get("metadata") or ())
                call = kind(path, metadata, request_serializer, response_deserializer)
                self._calls[call] = None
                call.start(self._network, self._address, request, timeout)
                return call

            return start

        return make

    def unary_unary(self, *a: Any, **k: Any) -> Any:
        return self._method(_UnaryCall)(*a, **k)

    def unary_stream(self, *a: Any, **k: Any) -> Any:
        return self._method(_StreamCall)(*a, **k)

    def stream_stream(self, *a: Any, **k: Any) -> Any:
        return self._method(_StreamCall)(*a, **k)

    def stream_unary(self, *a: Any, **k: Any) -> Any:
        return self._method(_UnaryCall)(*a, **k)

    async def close(self, grace: float | None = None) -> None:
        for call in list(self._calls):
            call.cancel()
        self._calls.clear()

    async def __aenter__(self) -> "SimulatedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Call:
    """One call at the client's side."""

    def __init__(self, path: str, metadata: tuple[Any, ...], pack: Any, unpack: Any) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._path, self._metadata = path, metadata
        # As in gRPC, a message without a serializer is bytes already.
        self._pack, self._unpack = pack or bytes, unpack or bytes
        self._end: End | None = None
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._status: asyncio.Future[_Status] = loop.create_future()
        self._connected: asyncio.Future[None] = loop.create_future()
        self._callbacks: list[Callable[[Any], None]] = []

    def start(self, network: Network, address: str, request: Any, timeout: float | None) -> None:
        self._task = self._loop.create_task(self._connect(network, address, request))
        if timeout is not None:
            late = _Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._loop.call_later(timeout, self._finish, late)

    async def _connect(self, network: Network, address: str, request: Any) -> None:
        try:
            end = await network.connect(address)
        except Refused as error:
            self._finish(_Status(_UNAVAILABLE, str(error)))
            return
        if self._status.done():
            end.close()
            return
        self._end = end
        end.pings = True
        end.on_message = self._receive
        end.on_close = lambda: self._finish(_Status(_UNAVAILABLE, "the connection broke"))
        end.send(("call", self._path, self._metadata))
        if isinstance(request, AsyncIterator) or hasattr(request, "__aiter__"):
            self._feeder = self._loop.create_task(self._feed(request))
        elif request is not None:
            end.send(("message", self._pack(request)))
            end.send(("half",))
        if not self._connected.done():
            self._connected.set_result(None)

    async def _feed(self, requests: Any) -> None:
        async for request in requests:
            if self._end is not None:
                self._end.send(("message", self._pack(request)))
        if self._end is not None:
            self._end.send(("half",))

    def _receive(self, message: tuple[Any, ...]) -> None:
        if self._status.done():
            return
        if message[0] == "message":
            self._inbox.put_nowait(message[1])
        else:
            self._finish(message[1])

    def _finish(self, status: _Status) -> None:
        if self._status.done():
            return
        self._status.set_result(status)
        self._inbox.put_nowait(None)
        if not self._connected.done():
            self._connected.set_result(None)
        if self._end is not None:
            self._end.close()
        for callback in self._callbacks:
            self._loop.call_soon(callback, self)

    # What production code calls

    def cancel(self) -> bool:
        if self._status.done():
            return False
        self._finish(_Status(_CANCELLED, "Locally cancelled by application!"))
        return True

    def cancelled(self) -> bool:
        return self._status.done() and self._status.result().details.startswith("Locally")

    def done(self) -> bool:
        return self._status.done()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._status)).code

    async def details(self) -> str:
        return (await asyncio.shield(self._status)).details

    async def initial_metadata(self) -> Any:
        return ()

    async def trailing_metadata(self) -> Any:
        return (await asyncio.shield(self._status)).trailing

    async def wait_for_connection(self) -> None:
        await asyncio.shield(self._connected)

    def _raise(self) -> None:
        status = self._status.result()
        if self.cancelled():
            raise asyncio.CancelledError
        if status.code is not _OK:
            raise grpc.aio.AioRpcError(
                status.code,
                grpc.aio.Metadata(),
                grpc.aio.Metadata(*status.trailing),
                status.details,
            )

    async def write(self, request: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        await asyncio.shield(self._connected)
        if self.done():
            self._raise()
        assert self._end is not None
        self._end.send(("message", self._pack(request)))

    async def done_writing(self) -> None:
        await asyncio.shield(self._connected)
        if self._end is not None:
            self._end.send(("half",))

    async def read(self) -> Any:
        if self._inbox.empty() and self.done():
            self._raise()
            return grpc.aio.EOF
        try:
            found = await self._inbox.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if found is None:
            self._raise()
            return grpc.aio.EOF
        return self._unpack(found)


class _StreamCall(_Call):
    def __aiter__(self) -> AsyncIterator[Any]:
        return self._all()

    async def _all(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


class _UnaryCall(_Call):
    def __await__(self) -> Any:
        return self._one().__await__()

    async def _one(self) -> Any:
        message = await self.read()
        await asyncio.shield(self._status)
        self._raise()
        return message


class SimulatedServer:
    """What `grpc.aio.server` gives."""

    def __init__(self, network: Network, interceptors: Any = ()) -> None:
        self._network = network
        self._interceptors = list(interceptors or ())
        self._handlers: list[Any] = []
        self._addresses: list[str] = []
        self._calls: dict[_ServerCall, None] = {}
        self._stopping = False

    def add_insecure_port(self, address: str) -> int:
        self._addresses.append(address)
        return int(address.rsplit(":", 1)[1])

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, *_: Any) -> None:
        """The same methods again."""

    async def start(self) -> None:
        for address in self._addresses:
            try:
                self._network.listen(address, self._accept)
            except OSError as error:
                raise RuntimeError(str(error)) from error

    async def stop(self, grace: float | None) -> None:
        process = current_process()
        assert process is not None
        for address in self._addresses:
            self._network.unlisten(address, process)
        if grace and self._calls:
            await asyncio.wait({call.task for call in self._calls if call.task}, timeout=grace)
        for call in list(self._calls):
            call.break_off()

    def _accept(self, end: End) -> None:
        _ServerCall(self, end)

    async def find(self, details: _Details) -> Any:
        """The handler of a method, as the interceptors leave it."""

        async def lookup(details: _Details) -> Any:
            for handlers in self._handlers:
                found = handlers.service(details)
                if found is not None:
                    return found
            return None

        find: Any = lookup
        for interceptor in reversed(self._interceptors):
            inner = find

            async def wrapped(details: _Details, inner: Any = inner, of: Any = interceptor) -> Any:
                return await of.intercept_service(inner, details)

            find = wrapped
        return await find(details)

    def note(self, call: "_ServerCall", here: bool) -> None:
        """A call has begun, or is over."""
        if here:
            self._calls[call] = None
        else:
            self._calls.pop(call, None)


class _ServerCall:
    """One call at the server's side, and the context that its handler sees."""

    def __init__(self, server: SimulatedServer, end: End) -> None:
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._end = end
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._callbacks: list[Callable[[Any], None]] = []
        self._metadata: tuple[Any, ...] = ()
        self._trailing: tuple[Any, ...] = ()
        self._over = False
        end.on_message = self._receive
        end.on_close = self.break_off
        end.pings = True

    def _receive(self, message: tuple[Any, ...]) -> None:
        match message[0]:
            case "call":
                self._metadata = message[2]
                self._server.note(self, True)
                details = _Details(message[1], message[2])
                self.task = asyncio.get_running_loop().create_task(self._handle(details))
            case "message":
                self._inbox.put_nowait(message[1])
            case "half":
                self._inbox.put_nowait(None)

    async def _handle(self, details: _Details) -> None:
        try:
            handler = await self._server.find(details)
            if handler is None:
                status = _Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            else:
                await self._run(handler)
                status = _Status(_OK)
        except grpc.aio.AbortError:
            status = self._aborted
        except asyncio.CancelledError:
            status = _Status(_CANCELLED)
        except Exception as error:
            status = _Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        if not self._over:
            self._end.send(("status", status))
        self._end_here()

    async def _run(self, handler: Any) -> None:
        unpack, pack = handler.request_deserializer, handler.response_serializer
        request: Any = self._requests(unpack)
        if not handler.request_streaming:
            request = await anext(request)
        if not handler.response_streaming:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            self._send(pack(await inner(request, self)))
            return
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        responses = inner(request, self)
        if asyncio.iscoroutine(responses):
            await responses
            return
        async for response in responses:
            self._send(pack(response))

    async def _requests(self, unpack: Any) -> AsyncIterator[Any]:
        while (message := await self._inbox.get()) is not None:
            if message is ...:
                raise grpc.aio.UsageError("the client has gone")
            yield unpack(message) if unpack else message

    def _send(self, data: bytes) -> None:
        self._end.send(("message", data))

    def break_off(self) -> None:
        """The client has gone, or the server goes."""
        if self._over:
            return
        self._inbox.put_nowait(...)
        self._end_here()
        if self.task is not None:
            self.task.cancel()

    def _end_here(self) -> None:
        if self._over:
            return
        self._over = True
        self._server.note(self, False)
        self._end.close()
        for callback in self._callbacks:
            callback(self)

    # What handlers call

    def invocation_metadata(self) -> tuple[Any, ...]:
        return self._metadata

    def set_trailing_metadata(self, trailing: tuple[Any, ...]) -> None:
        self._trailing = tuple(trailing)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Nothing of ours reads it."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        self._aborted = _Status(code, details, tuple(trailing) or self._trailing)
        raise grpc.aio.AbortError

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        return self._over

    def done(self) -> bool:
        return self._over

    def peer(self) -> str:
        return self._end.peer.process.name
