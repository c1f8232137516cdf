"""The preprocess replicas: each prompt goes to the one with the least in hand, and to another if
that one is gone.
"""

import time
from collections import Counter

import grpc
import structlog

from services.gateway.admission.prompt_stream import PromptStream, is_short
from services.gateway.api.openai.errors import BodyTooLarge
from shared.errors import Expired, Overloaded, ServingError, Unavailable
from shared.net.channels import open_channel
from shared.net.registry import Directory, Member
from shared.net.rpc.errors import calling
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest, PrepareResponse
from tessera.preprocess.v1.preprocess_pb2_grpc import PreprocessServiceStub

log = structlog.get_logger(__name__)

_TRIES = 3
_TIMEOUT_S = 60.0
# A replica that is lost is noticed well before this. One that is lost later may have been lost by the prompt.
_LONG_S = 15.0


class PreprocessPool:
    """Channels to the live replicas, opened at first use and closed when a replica leaves the
    registry.
    """

    def __init__(self, directory: Directory, max_message_bytes: int) -> None:
        self._directory = directory
        self._max_message_bytes = max_message_bytes
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._streams: dict[str, PromptStream] = {}
        self._in_hand: Counter[str] = Counter()
        self._turn = 0

    async def prepare(self, request: PrepareRequest) -> PrepareResponse:
        """Prepares a prompt. Raises what the replica raised; Unavailable when none could be
        reached.

        A prompt that a replica has worked on for long is not sent to another.
        """
        tried: list[Member] = []
        failure: ServingError = Unavailable(
            "NO_PREPROCESS", "no preprocess service is running; retry later"
        )
        deadline = time.monotonic() + _TIMEOUT_S
        for _ in range(_TRIES):
            member = self._next(tried)
            if member is None:
                break
            tried.append(member)
            began = time.monotonic()
            try:
                return await self._call(member, request, deadline - time.monotonic())
            except Unavailable as error:
                log.warning("preprocess refused", address=member.address, error=error.message)
                failure = error
                if time.monotonic() - began > _LONG_S:
                    break
        raise failure

    async def close(self) -> None:
        """Closes all channels."""
        await self._hang_up(list(self._channels))

    async def _call(
        self, member: Member, request: PrepareRequest, timeout_s: float
    ) -> PrepareResponse:
        if timeout_s <= 0:
            raise Expired("PREPARE_TIMEOUT", f"preparing the prompt took over {_TIMEOUT_S:.0f} s")
        channel = await self._channel(member.address)
        self._in_hand[member.address] += 1
        try:
            if is_short(request):
                return await self._streams[member.address].prepare(request, timeout_s)
            stub = PreprocessServiceStub(channel)
            with calling(f"preprocess at {member.address}"):
                answer: PrepareResponse = await stub.Prepare(request, timeout=timeout_s)
                return answer
        except Overloaded as error:
            if error.reason != grpc.StatusCode.RESOURCE_EXHAUSTED.name:
                raise
            # Not said by the service but by gRPC itself: the message is over the replica's limit.
            raise BodyTooLarge(
                "MEDIA_TOO_LARGE", f"the request's media are too large: {error.message}"
            ) from error
        finally:
            self._in_hand[member.address] -= 1

    def _next(self, tried: list[Member]) -> Member | None:
        live = [member for member in self._directory.members if member not in tried]
        if not live:
            return None
        self._turn += 1
        start = self._turn % len(live)
        # Of equally loaded ones each has its turn.
        return min(live[start:] + live[:start], key=lambda member: self._in_hand[member.address])

    async def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            live = {member.address for member in self._directory.members}
            unused = [a for a in self._channels if not self._in_hand[a]]
            await self._hang_up([address for address in unused if address not in live])
            if address not in self._channels:
                channel = open_channel(address, self._max_message_bytes)
                self._channels[address] = channel
                self._streams[address] = PromptStream(channel, f"preprocess at {address}")
        return self._channels[address]

    async def _hang_up(self, addresses: list[str]) -> None:
        """All are forgotten before the first is closed: another caller finds none of them then."""
        gone = [(self._streams.pop(a), self._channels.pop(a)) for a in addresses]
        for address in addresses:
            del self._in_hand[address]
        for stream, channel in gone:
            await stream.close()
            await channel.close()
