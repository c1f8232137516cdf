"""The preprocess replicas: each prompt goes to the one with the fewest calls under way, and to another if that one is
gone.
"""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import structlog

from services.gateway.admission.prompt_stream import PromptStream
from services.gateway.errors import BodyTooLarge
from services.gateway.timings import USUAL, Timings
from shared.environment import monotonic
from shared.errors import Expired, Overloaded, ServingError, Unavailable
from shared.net.channels import Connections, open_channel
from shared.net.rpc.errors import calling
from shared.queue.registry import Directory, Member
from tessera.preprocess.v1 import preprocess_pb2
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest, PrepareResponse

log = structlog.get_logger(__name__)

_SERVICE = preprocess_pb2.DESCRIPTOR.services_by_name["PreprocessService"].full_name
_PREPARE = f"/{_SERVICE}/Prepare"
_TRIES = 3
_TIMEOUT_S = 60.0
_LOOK_S = 0.1
# A replica with one of these has not refused the prompt: it is gone, or has not got so far.
_NOT_THERE = frozenset(
    {"NO_PREPROCESS", "UNAVAILABLE", "CALL_BROKEN", "PREPROCESS_GONE", "STARTING", "SHUTTING_DOWN"}
)


class _Replica:
    """The connection to one replica."""

    def __init__(self, address: str, max_message_bytes: int) -> None:
        self._name = f"preprocess at {address}"
        self._channel = open_channel(address, max_message_bytes)
        self._stream = PromptStream(self._channel, self._name)
        # `Prepare` of a message that has been serialized.
        self._prepare: Callable[..., Awaitable[PrepareResponse]] = self._channel.unary_unary(
            _PREPARE, response_deserializer=PrepareResponse.FromString
        )

    async def prepare(self, prompt: PrepareRequest | bytes, timeout_s: float) -> PrepareResponse:
        """Prepares a prompt."""
        if not isinstance(prompt, bytes):
            return await self._stream.prepare(prompt, timeout_s)
        with calling(self._name):
            return await self._prepare(prompt, timeout=timeout_s)

    async def close(self) -> None:
        """Ends the calls under way."""
        await self._stream.close()
        await self._channel.close()


class PreprocessPool:
    """The live replicas, connected to at first use."""

    def __init__(
        self, directory: Directory, max_message_bytes: int, timings: Timings = USUAL
    ) -> None:
        self._directory = directory
        self._timings = timings
        self._replicas = Connections(lambda address: _Replica(address, max_message_bytes))
        self._turn = 0

    async def prepare(
        self, prompt: PrepareRequest | bytes, asked: list[str] | None = None
    ) -> PrepareResponse:
        """Prepares a prompt: a short one (`is_short`) in a message together with others, a longer one serialized. The
        replicas that were asked, the last of which has answered, are added to `asked`.

        Raises what the replica raised; Unavailable when none could be
        reached.

        While all replicas are gone or start, the prompt waits for one. One that a replica has worked on for long, or
        that was lost with several, is not sent to another.
        """
        tried: set[Member] = set()
        failure: ServingError = Unavailable(
            "NO_PREPROCESS", "no preprocess service is running; retry later"
        )
        deadline = monotonic() + _TIMEOUT_S
        patient_until = monotonic() + self._timings.preprocess_s
        while len(tried) < _TRIES:
            member = self._next(tried)
            if member is None:
                if failure.reason not in _NOT_THERE or monotonic() >= patient_until:
                    break
                # Until one that starts has announced itself: as a member that was not tried.
                await asyncio.sleep(_LOOK_S)
                continue
            tried.add(member)
            if asked is not None:
                asked.append(member.instance_id)
            began = monotonic()
            try:
                return await self._call(member, prompt, deadline - monotonic())
            except Unavailable as error:
                log.warning("preprocess refused", address=member.address, error=error.message)
                failure = error
                if monotonic() - began > self._timings.lost_by_prompt_s:
                    break
        raise failure

    async def close(self) -> None:
        """Closes all connections."""
        await self._replicas.close()

    async def _call(
        self, member: Member, prompt: PrepareRequest | bytes, timeout_s: float
    ) -> PrepareResponse:
        if timeout_s <= 0:
            raise Expired("PREPARE_TIMEOUT", f"preparing the prompt took over {_TIMEOUT_S:.0f} s")
        try:
            with self._replicas.use(member.address) as replica:
                return await replica.prepare(prompt, timeout_s)
        except Overloaded as error:
            if error.reason != grpc.StatusCode.RESOURCE_EXHAUSTED.name:
                raise
            # Not the service's own error but gRPC's: the message is over the replica's limit.
            raise BodyTooLarge(
                "MEDIA_TOO_LARGE", f"the request's media are too large: {error.message}"
            ) from error

    def _next(self, tried: set[Member]) -> Member | None:
        live = [member for member in self._directory.members if member not in tried]
        if not live:
            return None
        self._turn += 1
        start = self._turn % len(live)
        # Of equally loaded ones each has its turn.
        return min(live[start:] + live[:start], key=lambda m: self._replicas.calls(m.address))
