"""Takes in the media of requests: gets the bytes, makes the pixels, keeps the bytes for whoever needs them later."""

import asyncio
from dataclasses import dataclass

from services.preprocess import frames
from services.preprocess.data_url import decode_data_url, is_data_url
from services.preprocess.media_fetch import MediaFetcher
from services.preprocess.pixel_cache import PixelCache, Pixels
from shared.errors import InvalidRequest, Precondition
from shared.media_store import MediaStore, media_digest
from shared.pixel_scaling import PixelScaling
from shared.telemetry import Stopwatch
from tessera.common.v1.media_pb2 import MediaItem
from tessera.preprocess.v1.preprocess_pb2 import Media, Video

_SECONDS_PER_FRAME = 0.5
_MOST_SECONDS_PER_FRAME = 3600.0
_HASHED_AT_ONCE_BYTES = 1 << 16  # less takes no longer than the way to another thread


@dataclass(frozen=True)
class TakenImage:
    """One image of a prompt: its names, its pixels, and what it cost."""

    digest: bytes
    source_digest: bytes
    pixels: Pixels
    fetch_us: int
    media_us: int
    frames: int = 0  # of a video
    seconds_per_frame: float = 0.0


class MediaIntake:
    """The way of an image from the client to pixel values."""

    def __init__(
        self, fetcher: MediaFetcher, cache: PixelCache, store: MediaStore, max_bytes: int
    ) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._store = store
        self._max_bytes = max_bytes

    @property
    def scaling(self) -> PixelScaling | None:
        """What makes values of the pixels' bytes; None where they are values."""
        return self._cache.scaling

    async def take(self, media: Media) -> TakenImage:
        """Pixel values of a client's image; its raw bytes are in the media store when it returns.

        Raises InvalidRequest naming the client's field, Overloaded, Unavailable.
        """
        try:
            watch = Stopwatch()
            data = await self._bytes(media)
            fetch_us = watch.lap_us()
            source_digest = await _digest(data)
            digest = self._cache.digest(source_digest)
            pixels = await self._cache.get(digest, data)
            await self._store.put(source_digest, data)
        except InvalidRequest as error:
            field = media.field or "image"
            raise InvalidRequest(
                error.reason, f"{field}: {error.message}", **{**error.metadata, "field": field}
            ) from error
        return TakenImage(digest, source_digest, pixels, fetch_us, watch.lap_us())

    async def take_video(self, video: Video) -> TakenImage:
        """The same for the frames of a video: together they are one item, with its pace in its name."""
        field = video.field or "video"
        pace = video.seconds_per_frame or _SECONDS_PER_FRAME
        if not 0 < pace < _MOST_SECONDS_PER_FRAME:
            raise InvalidRequest(
                "BAD_VIDEO",
                f"{field}: {pace:g} seconds from frame to frame are not between 0 and"
                f" {_MOST_SECONDS_PER_FRAME:g}",
                field=field,
            )
        watch = Stopwatch()
        try:
            files = [await self._bytes(frame) for frame in video.frames]
            fetch_us = watch.lap_us()
            data = frames.pack(files, pace)
            source_digest = await _digest(data)
            digest = self._cache.digest(source_digest)
            pixels = await self._cache.get(digest, data)
            await self._store.put(source_digest, data)
        except InvalidRequest as error:
            raise InvalidRequest(
                error.reason, f"{field}: {error.message}", **{**error.metadata, "field": field}
            ) from error
        return TakenImage(digest, source_digest, pixels, fetch_us, watch.lap_us(), len(files), pace)

    async def pixels_again(self, media: MediaItem) -> Pixels:
        """Pixel values of an item that was taken in before, here or in another process.

        Raises NotFound when the raw bytes have expired, Precondition when the item was made with
        other settings.
        """
        found = self._cache.find(media.digest)
        if found is not None:
            return found
        if self._cache.digest(media.source_digest) != media.digest:
            raise Precondition(
                "PROCESSOR_MISMATCH",
                "the item was prepared with other image processor settings; send the request again",
            )
        return await self._cache.get(media.digest, await self._store.get(media.source_digest))

    async def _bytes(self, media: Media) -> bytes:
        kind = media.WhichOneof("source")
        if kind == "data":
            data = media.data
        elif kind == "url" and is_data_url(media.url):
            data = await asyncio.to_thread(decode_data_url, media.url, self._max_bytes)
        elif kind == "url" and media.url:
            data = await self._fetcher.fetch(media.url)
        else:
            raise InvalidRequest("MEDIA_EMPTY", "neither an address nor bytes are given")
        if not data:
            raise InvalidRequest("MEDIA_EMPTY", "the file is empty")
        if frames.is_packed(data):  # only we write these
            raise InvalidRequest("IMAGE_FORMAT", "this is not an image file")
        if len(data) > self._max_bytes:
            raise InvalidRequest(
                "MEDIA_TOO_LARGE",
                f"the file has {len(data)} bytes, the limit is {self._max_bytes}",
            )
        return data


async def _digest(data: bytes) -> bytes:
    if len(data) <= _HASHED_AT_ONCE_BYTES:
        return media_digest(data)
    return await asyncio.to_thread(media_digest, data)
