"""The intake of media: gets the bytes, makes the pixel values, stores the bytes for processing them again later."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.preprocess.download.fetcher import MediaFetcher
from services.preprocess.items.local_files import LocalFiles, is_file_url
from services.preprocess.items.pixel_cache import PixelCache, Pixels
from services.preprocess.measures import PreprocessMeasures
from services.preprocess.media import fitted_picture, frames, item_options, packed_pixels
from services.preprocess.media.fitted_picture import Square
from services.preprocess.media.frame_selection import FrameSelection
from services.preprocess.media.item_options import Options
from shared.artifacts.pixel_scaling import PixelScaling
from shared.errors import InvalidRequest, Precondition
from shared.prompts.data_url import (
    BadDataUrl,
    data_url_head,
    decode_data,
    is_base64,
    is_data_url,
)
from shared.prompts.modality import IMAGE, NAMES, VIDEO, modality_of, read_modality
from shared.queue.stores.media_store import MediaStore, media_digest
from shared.telemetry.logs import Stopwatch
from tessera.common.v1.media_pb2 import MediaItem, Modality
from tessera.preprocess.v1.preprocess_pb2 import Media, Video

_SECONDS_PER_FRAME = 0.5
_MOST_SECONDS_PER_FRAME = 3600.0
_HASHED_AT_ONCE_BYTES = 1 << 16  # hashing less takes no longer than switching threads


@dataclass(frozen=True)
class TakenMedia:
    """One media item of a prompt: digests, pixel values, times."""

    digest: bytes
    source_digest: bytes
    pixels: Pixels
    fetch_us: int
    media_us: int
    seconds_per_frame: float = 0.0  # of a video
    cached: bool = False  # the pixels were cached


@dataclass(frozen=True)
class IntakeLimits:
    """The largest files of images and videos in bytes, and the selection of a video's frames."""

    image_bytes: int
    video_bytes: int
    frame_selection: FrameSelection


@dataclass(frozen=True)
class Handling:
    """What a request says of one item: options of its processor, the selection of its frames (None: the usual one), and
    the name that the client gives it.
    """

    options: Options = field(default_factory=dict)
    selection: FrameSelection | None = None
    name: str = ""


USUAL = Handling()


class MediaIntake:
    """Turns a client's media into pixel values."""

    def __init__(
        self,
        fetcher: MediaFetcher,
        local_files: LocalFiles,
        cache: PixelCache,
        store: MediaStore,
        limits: IntakeLimits,
        measures: PreprocessMeasures | None = None,
    ) -> None:
        self._measures = measures or PreprocessMeasures()
        self._fetcher = fetcher
        self._local_files = local_files
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

    @property
    def frame_selection(self) -> FrameSelection:
        """The usual selection of a video's frames."""
        return self._limits.frame_selection

    async def take(
        self,
        media: Media,
        modality: Modality.ValueType,
        tenant: str,
        square: Square | None = None,
        how: Handling = USUAL,
    ) -> TakenMedia:
        """Pixel values of a client's item that is one file; its raw bytes are in the media store when it returns.

        Decoding counts against the tenant's budget. With `square` an image is fitted into it first.
        A file without a source is the one that the tenant has given its name; one with a source gets it.

        Raises InvalidRequest naming the client's field, Overloaded, Unavailable.
        """
        with _naming(media.field or NAMES[modality]):
            watch = Stopwatch()
            data = await self._file(media, self._limits.image_bytes, how.name, tenant)
            if square is not None:
                data = square.pack(data)
            data = item_options.pack(how.options, data)
            return await self._keep(data, modality, tenant, watch.lap_us(), watch, how.name)

    async def take_video(self, video: Video, tenant: str, how: Handling = USUAL) -> TakenMedia:
        """The same for a video: its frames are one item, and the seconds per frame are part of its digest."""
        with _naming(video.field or NAMES[VIDEO]):
            watch = Stopwatch()
            if how.name and not video.HasField("file") and not video.frames:
                stored = await self._named(tenant, how.name)
                data = _video_again(stored, self._limits.frame_selection, how.selection)
            elif video.HasField("file"):
                file = await self._bytes(video.file, self._limits.video_bytes)
                selection = how.selection or self._limits.frame_selection
                data = frames.pack_video_file(file, selection)
            else:
                if how.selection is not None:
                    raise _all_shown()
                pace = _pace(video.seconds_per_frame)
                limit = self._limits.image_bytes
                files = [await self._bytes(frame, limit) for frame in video.frames]
                data = frames.pack(files, pace)
            data = item_options.pack(how.options, data)
            return await self._keep(data, VIDEO, tenant, watch.lap_us(), watch, how.name)

    async def take_packed(self, data: bytes, tenant: str, field: str) -> TakenMedia:
        """The same for an image's pixel values that are made already (`packed_pixels`)."""
        with _naming(field):
            return await self._keep(data, IMAGE, tenant, 0, Stopwatch())

    async def _keep(
        self,
        data: bytes,
        modality: Modality.ValueType,
        tenant: str,
        fetch_us: int,
        watch: Stopwatch,
        name: str = "",
    ) -> TakenMedia:
        source_digest = await _digest(data)
        digest = self._cache.digest(source_digest)
        cached = self._cache.find(digest) is not None
        pixels = await self._cache.get(digest, data, modality, tenant)
        item = pixels.item
        pace = _pace(item.seconds_per_frame) if item.modality == VIDEO else 0.0
        await self._store.put(source_digest, data)
        if name:
            await self._store.name(tenant, name, source_digest)
        media_us = watch.lap_us()
        size = item.width * item.height
        self._measures.taken(NAMES[item.modality], len(data), size, cached=cached)
        self._measures.item_times(fetch_us, media_us)
        return TakenMedia(digest, source_digest, pixels, fetch_us, media_us, pace, cached)

    async def pixels_again(self, media: MediaItem) -> Pixels:
        """Pixel values of an item that was taken in before, here or in another process.

        Raises InvalidRequest for a modality that is not served, NotFound when the raw bytes have expired, Precondition
        when the item was made with other settings.
        """
        modality_of(media)
        alike = self._cache.digest(media.source_digest) == media.digest
        if not alike and self._cache.find(media.digest) is None:
            raise Precondition(
                "PROCESSOR_MISMATCH",
                "the item was prepared with other image processor settings; send the request again",
            )
        return await self._cache.hand_out(media.digest, lambda: self._stored(media))

    async def _stored(self, media: MediaItem) -> tuple[bytes, Modality.ValueType]:
        data = await self._store.get(media.source_digest)
        # What an item of an older version does not say, its raw bytes do.
        unset = VIDEO if frames.is_packed(item_options.unpack(data)[1]) else IMAGE
        return data, read_modality(media.modality, "media", unset)

    async def _file(self, media: Media, limit: int, name: str, tenant: str) -> bytes:
        if name and media.WhichOneof("source") is None:
            return _picture_again(await self._named(tenant, name))
        return await self._bytes(media, limit)

    async def _named(self, tenant: str, name: str) -> bytes:
        """What the tenant has sent under a name, as it was packed. Raises InvalidRequest."""
        data = await self._store.named(tenant, name)
        if data is None:
            raise InvalidRequest(
                "UNKNOWN_UUID",
                f"nothing is kept under the uuid {name[:64]!r}: send the item's bytes again, with it",
            )
        return data

    async def _bytes(self, media: Media, limit: int) -> bytes:
        kind = media.WhichOneof("source")
        if kind == "data":
            data = media.data
        elif kind == "url" and is_data_url(media.url):
            data = await asyncio.to_thread(_decoded, media.url, limit)
        elif kind == "url" and is_file_url(media.url):
            data = await asyncio.to_thread(self._local_files.read, media.url, limit)
        elif kind == "url" and media.url:
            data = await self._fetcher.fetch(media.url, limit)
        else:
            raise InvalidRequest("MEDIA_EMPTY", "neither an address nor bytes are given")
        if not data:
            raise InvalidRequest("MEDIA_EMPTY", "the file is empty")
        # Our own formats, never a client's.
        forms = (fitted_picture, frames, item_options, packed_pixels)
        if any(form.is_packed(data) for form in forms):
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


def _picture_again(data: bytes) -> bytes:
    """The file of a picture that was stored. Raises InvalidRequest for what is none."""
    _, file = item_options.unpack(data)
    if fitted_picture.is_packed(file):
        _, file = fitted_picture.unpack(file)
    if frames.is_packed(file) or packed_pixels.is_packed(file):
        raise InvalidRequest("WRONG_UUID", "its uuid is that of an item of another kind")
    return file


def _video_again(data: bytes, usual: FrameSelection, asked: FrameSelection | None) -> bytes:
    """A video that was stored, packed with a selection of its frames where it is a file. Raises InvalidRequest for what
    is none.
    """
    _, packed = item_options.unpack(data)
    if not frames.is_packed(packed):
        raise InvalidRequest("WRONG_UUID", "its uuid is that of an item of another kind")
    if not frames.is_video_file(packed):
        if asked is not None:
            raise _all_shown()
        return packed
    file, _ = frames.unpack_video_file(packed)
    return frames.pack_video_file(file, asked or usual)


def _all_shown() -> InvalidRequest:
    return InvalidRequest(
        "MEDIA_OPTION",
        "its frames were sent, and all of them are shown: leave out how many are wanted",
    )


def _pace(seconds: float) -> float:
    pace = seconds or _SECONDS_PER_FRAME
    if not 0 < pace < _MOST_SECONDS_PER_FRAME:
        raise InvalidRequest(
            "BAD_VIDEO",
            f"{pace:g} seconds from frame to frame are not between 0 and"
            f" {_MOST_SECONDS_PER_FRAME:g}",
        )
    return pace


def _decoded(url: str, most_bytes: int) -> bytes:
    """The file in a data URL, whose length is looked at first. Raises InvalidRequest."""
    try:
        _, parameters = data_url_head(url)
        data, in_base64 = url.partition(",")[2], is_base64(parameters)
        # Base64 makes four characters of three bytes.
        if len(data) > (most_bytes * 4 // 3 + 4 if in_base64 else most_bytes * 3):
            raise InvalidRequest("MEDIA_TOO_LARGE", f"media are limited to {most_bytes} bytes")
        return decode_data(data, in_base64)
    except BadDataUrl as error:
        raise InvalidRequest("MEDIA_URL", f"it {error}") from error


async def _digest(data: bytes) -> bytes:
    if len(data) <= _HASHED_AT_ONCE_BYTES:
        return media_digest(data)
    return await asyncio.to_thread(media_digest, data)
