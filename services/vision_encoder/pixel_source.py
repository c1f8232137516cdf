"""Where pixel values come from: the place they were at admission, else any preprocess that makes them again."""

import structlog

from shared.artifacts.file import Array
from shared.artifacts.store import ArtifactReader
from shared.errors import NotFound, ServingError, Unavailable
from shared.net.channels import Channels
from shared.net.rpc.errors import calling
from shared.queue.registry import Directory, Member
from shared.telemetry import request_names
from tessera.common.v1.media_pb2 import MediaItem
from tessera.preprocess.v1.preprocess_pb2 import GetPixelsRequest
from tessera.preprocess.v1.preprocess_pb2_grpc import PreprocessServiceStub

log = structlog.get_logger(__name__)

_TIMEOUT_S = 30.0


class PixelSource:
    """Opens the artifact named at admission, else asks the preprocess services to make the pixels again."""

    def __init__(self, reader: ArtifactReader, directory: Directory) -> None:
        self._reader = reader
        self._directory = directory
        self._channels = Channels()

    async def get(self, media: MediaItem) -> Array:
        """Pixel values, read-only. Raises NotFound when the raw bytes have expired everywhere,
        Unavailable when no preprocess can be reached, or what a preprocess refuses the item with.
        """
        if media.HasField("pixels") and media.pixels.digest == media.digest:
            local = self._reader.try_open_local(media.pixels)
            if local is not None:
                return local
        failure: ServingError = Unavailable(
            "NO_PREPROCESS", "no preprocess is running; start one and retry"
        )
        # The one that made them first is likely to have them still.
        for member in self._in_order(media):
            try:
                return await self._from(member, media)
            except (NotFound, Unavailable) as error:
                log.warning("no pixels", member=member.address, error=error.message)
                failure = error
        raise failure

    async def close(self) -> None:
        """Closes the channels."""
        await self._channels.close()

    def _in_order(self, media: MediaItem) -> list[Member]:
        holder = media.pixels.location.address
        return sorted(self._directory.pick(media.digest), key=lambda m: m.address != holder)

    async def _from(self, member: Member, media: MediaItem) -> Array:
        with self._channels.use(member.address) as channel:
            stub = PreprocessServiceStub(channel)
            with calling(f"preprocess {member.address}"):
                answer = await stub.GetPixels(
                    GetPixelsRequest(media=media),
                    timeout=_TIMEOUT_S,
                    metadata=request_names.metadata(),
                )
        return await self._reader.open(answer.pixels)
