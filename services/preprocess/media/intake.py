"""The intake of media: gets the bytes, makes the pixel values, stores the bytes for processing them again later."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from services.preprocess.download.fetcher import MediaFetcher
from services.preprocess.media import fitted_picture, frames, packed_pixels
from services.preprocess.media.data_url import decode_data_url, is_data_url
from services.preprocess.media.fitted_picture import Square
from services.preprocess.media.frame_selection import FrameSelection
from services.preprocess.media.pixel_cache import PixelCache, Pixels
from shared.artifacts.pixel_scaling import PixelScaling
from shared.errors import InvalidRequest, Precondition
from shared.queue.media_store import MediaStore, media_digest
from shared.telemetry.logs import Stopwatch
from tessera.common.v1.media_pb2 import MediaItem
from tessera.preprocess.v1.preprocess_pb2 import Media, Video

_SECONDS_PER_FRAME = 0.5
_MOST_SECONDS_PER_FRAME = 3600.0
_HASHED_AT_ONCE_BYTES = 1 << 16  # hashing less takes no longer than switching threads


@dataclass(frozen=True)
class TakenMedia:
    """One image or video of a prompt: digests, pixel values, times. `frames` is a video's number of frames."""

    digest: bytes
    source_digest: bytes
    pixels: Pixels
    fetch_us: int
    media_us: int
    frames: int = 0
    seconds_per_frame: float = 0.0
    cached: bool = False  # the pixels were cached


@dataclass(frozen=True)
class IntakeLimits:
    """The largest files of images and videos in bytes, and the selection of a video's frames."""

    image_bytes: int
    video_bytes: int
    frame_selection: FrameSelection


class MediaIntake:
    """Turns a client's images and videos into pixel values."""

    def __init__(
        self, fetcher: MediaFetcher, cache: PixelCache, store: MediaStore, limits: IntakeLimits
    ) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._store = store
        self._limits = limits

    @property
    def scaling(self) -> PixelScaling | None:
        """The scaling of pixels stored as uint8; None where they are stored as float32 or in bundles."""
        return self._cache.scaling

    @property
    def bundles(self) -> bool:
        """Whether an item's artifact is a bundle of several tensors."""
        return self._cache.bundles

    async def take(self, media: Media, tenant: str, square: Square | None = None) -> TakenMedia:
        """Pixel values of a client's image; its raw bytes are in the media store when it returns.

        Decoding counts against the tenant's budget. With `square` the image is fitted into it first.

        Raises InvalidRequest naming the client's field, Overloaded, Unavailable.
        """
        with _naming(media.field or "image"):
            watch = Stopwatch()
            data = await self._bytes(media, self._limits.image_bytes)
            if square is not None:
                data = square.pack(data)
            return await self._keep(data, tenant, watch.lap_us(), watch)

    async def take_video(self, video: Video, tenant: str) -> TakenMedia:
        """The same for a video: its frames are one item, and the seconds per frame are part of its digest."""
        with _naming(video.field or "video"):
            watch = Stopwatch()
            if video.HasField("file"):
                file = await self._bytes(video.file, self._limits.video_bytes)
                data = frames.pack_video_file(file, self._limits.frame_selection)
            else:
                pace = _pace(video.seconds_per_frame)
                limit = self._limits.image_bytes
                files = [await self._bytes(frame, limit) for frame in video.frames]
                data = frames.pack(files, pace)
            return await self._keep(data, tenant, watch.lap_us(), watch)

    async def take_packed(self, data: bytes, tenant: str, field: str) -> TakenMedia:
        """The same for pixel values that are made already (`packed_pixels`)."""
        with _naming(field):
            return await self._keep(data, tenant, 0, Stopwatch())

    async def _keep(self, data: bytes, tenant: str, fetch_us: int, watch: Stopwatch) -> TakenMedia:
        source_digest = await _digest(data)
        digest = self._cache.digest(source_digest)
        cached = self._cache.find(digest) is not None
        pixels = await self._cache.get(digest, data, tenant)
        item = pixels.item
        pace = _pace(item.seconds_per_frame) if item.frames else 0.0
        await self._store.put(source_digest, data)
        return TakenMedia(
            digest, source_digest, pixels, fetch_us, watch.lap_us(), item.frames, pace, cached
        )

    async def pixels_again(self, media: MediaItem) -> Pixels:
        """Pixel values of an item that was taken in before, here or in another process.

        Raises NotFound when the raw bytes have expired, Precondition when the item was made with
        other settings.
        """
        alike = self._cache.digest(media.source_digest) == media.digest
        if not alike and self._cache.find(media.digest) is None:
            raise Precondition(
                "PROCESSOR_MISMATCH",
                "the item was prepared with other image processor settings; send the request again",
            )
        return await self._cache.hand_out(
            media.digest, lambda: self._store.get(media.source_digest)
        )

    async def _bytes(self, media: Media, limit: int) -> bytes:
        kind = media.WhichOneof("source")
        if kind == "data":
            data = media.data
        elif kind == "url" and is_data_url(media.url):
            data = await asyncio.to_thread(decode_data_url, media.url, limit)
        elif kind == "url" and media.url:
            data = await self._fetcher.fetch(media.url, limit)
        else:
            raise InvalidRequest("MEDIA_EMPTY", "neither an address nor bytes are given")
        if not data:
            raise InvalidRequest("MEDIA_EMPTY", "the file is empty")
        # Our own formats, never a client's.
        if any(form.is_packed(data) for form in (fitted_picture, frames, packed_pixels)):
            raise InvalidRequest("IMAGE_FORMAT", "this is not an image file")
        if len(data) > limit:
            raise InvalidRequest(
                "MEDIA_TOO_LARGE", f"the file has {len(data)} bytes, the limit is {limit}"
            )
        return data


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
    """Adds the client's field to errors about its media."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(
            error.reason, f"{field}: {error.message}", **{**error.metadata, "field": field}
        ) from error


def _pace(seconds: float) -> float:
    pace = seconds or _SECONDS_PER_FRAME
    if not 0 < pace < _MOST_SECONDS_PER_FRAME:
        raise InvalidRequest(
            "BAD_VIDEO",
            f"{pace:g} seconds from frame to frame are not between 0 and"
            f" {_MOST_SECONDS_PER_FRAME:g}",
        )
    return pace


async def _digest(data: bytes) -> bytes:
    if len(data) <= _HASHED_AT_ONCE_BYTES:
        return media_digest(data)
    return await asyncio.to_thread(media_digest, data)
