"""gRPC servers: the public API, and the sockets between the services."""

import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from tests.fuzz.messages import random_message
from tests.fuzz.verdict import Broken, ends_in_time

# What no input may bring about: these say that the server failed, is gone, or was too slow.
_BROKEN = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
_METADATA = [
    "idempotency-key",
    "last-event-id",
    "x-tessera-resume",
    "x-tessera-request-timeout",
    "x-request-id",
]
_MOST_EVENTS = 2000
# What grpc.aio says on the client's side where the server has ended a stream on which the client was still sending.
_ENDED_EARLY = "Internal error from Core"
# Servers end old connections; our own callers call again.
_AGED = "Debug Text: max_age))"
# What a decoder says to a peer that has opened a stream and sends nothing: this program may be kept waiting for a core.
_TOO_LATE = "no `open` came within"


class GrpcTarget:
    """Calls the methods of some services at one address, with the bytes of messages."""

    def __init__(self, name: str, address: str, services: Sequence[ServiceDescriptor]) -> None:
        self.name = name
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._methods = [method for service in services for method in service.methods]

    async def send(self, draw: random.Random) -> str:
        """The name of the call's status. Raises Broken."""
        method = draw.choice(self._methods)
        try:
            await ends_in_time(self._call(draw, method))
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            if method.client_streaming and details == _ENDED_EARLY:
                return "ENDED_EARLY"
            if details.startswith(_TOO_LATE):
                return "TOO_LATE"
            if details.endswith(_AGED):
                return "CONNECTION_AGED"
            if error.code() in _BROKEN:
                raise Broken(f"{method.full_name}: {error.code().name}: {details}") from None
            return error.code().name
        return "OK"

    async def _call(self, draw: random.Random, method: MethodDescriptor) -> None:
        """Reads the answer to its end, or as far as a client may that leaves."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        count = draw.choice([0, 1, 1, 1, 3]) if method.client_streaming else 1
        messages = [random_message(draw, method.input_type) for _ in range(count)]
        metadata = [
            (draw.choice(_METADATA), draw.choice(["", "-1", "r_a_b/9e", "1e99", "a" * 2000, "nan"]))
            for _ in range(draw.choice([0, 0, 0, 1, 2]))
        ]
        most = draw.choice([1, _MOST_EVENTS, _MOST_EVENTS])
        call: Any
        if method.client_streaming:
            call = self._channel.stream_stream(path)
            call = call(_stream(messages), metadata=metadata)
        elif method.server_streaming:
            call = self._channel.unary_stream(path)
            call = call(messages[0], metadata=metadata)
        else:
            call = self._channel.unary_unary(path)
            await call(messages[0], metadata=metadata)
            return
        try:
            read = 0
            async for _ in call:
                read += 1
                if read == most:
                    break
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


async def _stream(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
