"""Has media items encoded: one call for a digest, at the encoder that it prefers, the next one if that is gone."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog
from google.protobuf.duration_pb2 import Duration

from shared.errors import NotFound, Overloaded, ServingError, Unavailable
from shared.registry import Directory, Member
from shared.rpc import calling, channel
from tessera.artifact.v1.artifact_pb2 import ArtifactRef
from tessera.common.v1.media_pb2 import MediaItem
from tessera.vision_encoder.v1.vision_encoder_pb2 import EncodeRequest, ReleaseRequest
from tessera.vision_encoder.v1.vision_encoder_pb2_grpc import VisionEncoderServiceStub

if TYPE_CHECKING:
    from tessera.vision_encoder.v1.vision_encoder_pb2_grpc import VisionEncoderServiceAsyncStub

log = structlog.get_logger(__name__)

_HOLD_S = 60
_CALL_TIMEOUT_S = 60
_BUSY_WAIT_S = 0.05
_PATIENCE_S = 30.0


class Encoders:
    """The vision encoders, called by digest. Calls for the same item from several decoders are one."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._stubs: dict[str, VisionEncoderServiceAsyncStub] = {}
        self._running: dict[bytes, asyncio.Task[ArtifactRef]] = {}
        self._holders: dict[bytes, Member] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def encode(self, item: MediaItem) -> ArtifactRef:
        """The item's embeddings.

        A full encoder is waited for, a dead one passed over, for up to half a minute. Raises Unavailable when no
        encoder can be had, or what the encoder said is wrong with the item.
        """
        task = self._running.get(item.digest)
        if task is None:
            task = asyncio.create_task(self._encode(item))
            self._running[item.digest] = task
            task.add_done_callback(lambda _: self._running.pop(item.digest, None))
        return await asyncio.shield(task)

    def release(self, digests: Iterable[bytes]) -> None:
        """Tells encoders that nobody waits for these any more. Returns at once; a lost call only costs cache."""
        by_member: dict[Member, list[bytes]] = {}
        for digest in digests:
            holder = self._holders.pop(digest, None)
            if holder is not None:
                by_member.setdefault(holder, []).append(digest)
        for member, held in by_member.items():
            task = asyncio.create_task(self._release(member, held))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _encode(self, item: MediaItem) -> ArtifactRef:
        request = EncodeRequest(media=item, hold=Duration(seconds=_HOLD_S))
        problem: ServingError = Unavailable("NO_VISION_ENCODER", "no vision encoder is running")
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while asyncio.get_running_loop().time() < deadline:
            for member in self._directory.pick(item.digest):
                try:
                    with calling("vision_encoder"):
                        answer = await self._stub(member).Encode(request, timeout=_CALL_TIMEOUT_S)
                except Overloaded as error:
                    problem = error
                    break  # the same one again: another would encode what this one has or will have
                except (Unavailable, NotFound) as error:
                    log.warning(
                        "encode failed, trying on", encoder=member.instance_id, error=error.message
                    )
                    problem = error
                else:
                    self._holders[item.digest] = member
                    return answer.embeddings
            await asyncio.sleep(_BUSY_WAIT_S)
        raise problem

    async def _release(self, member: Member, digests: list[bytes]) -> None:
        try:
            with calling("vision_encoder"):
                await self._stub(member).Release(ReleaseRequest(digests=digests), timeout=5)
        except ServingError as error:
            log.debug("release failed", encoder=member.instance_id, error=error.message)

    def _stub(self, member: Member) -> "VisionEncoderServiceAsyncStub":
        stub = self._stubs.get(member.address)
        if stub is None:
            stub = self._stubs[member.address] = VisionEncoderServiceStub(channel(member.address))
        return stub
