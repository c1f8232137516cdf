"""Media items to embedding artifacts: encodes each item once, caches the results, checks their size."""

import traceback
from dataclasses import dataclass

import numpy as np

from services.vision_encoder.byte_gate import ByteGate
from services.vision_encoder.cache import EmbeddingCache
from services.vision_encoder.measures import EncoderMeasures
from services.vision_encoder.pixel_source import PixelSource
from services.vision_encoder.queue import Encoded, TowerQueue
from services.vision_encoder.towers.encoder import BadPixels, Encoder, Item, pixel_item
from shared.artifacts import bundle
from shared.artifacts.embedding_name import embedding_name
from shared.artifacts.file import Array
from shared.artifacts.pixel_scaling import PixelScaling
from shared.artifacts.store import ArtifactStore, Reservation
from shared.errors import Overloaded, Precondition
from shared.net.single_flight import SingleFlight
from shared.prompts.modality import modality_of
from tessera.artifact.v1.artifact_pb2 import ArtifactRef
from tessera.common.v1.media_pb2 import MediaItem, PixelFormat


@dataclass(frozen=True)
class EncodeResult:
    """Where an item's embeddings are, and whether and how long they were computed."""

    ref: ArtifactRef
    cached: bool
    encode_us: int
    queue_us: int = 0  # before that
    items: int = 0  # that were encoded together


class EmbeddingProducer:
    """Encodes items of one model."""

    def __init__(
        self,
        model: Encoder,
        queue: TowerQueue,
        source: PixelSource,
        store: ArtifactStore,
        cache: EmbeddingCache,
        measures: EncoderMeasures | None = None,
    ) -> None:
        self._measures = measures or EncoderMeasures()
        self._measures.cache_bytes = lambda: cache.nbytes
        self._row_bytes = model.hidden_size * model.dtype.itemsize
        self._queue = queue
        self._source = source
        self._store = store
        self._cache = cache
        self._mapped = ByteGate(store.space.in_use_bytes)
        self._encoding: SingleFlight[bytes, EncodeResult] = SingleFlight()

    async def encode(
        self, media: MediaItem, retain_s: float, content: bytes = b"", numerics: str = ""
    ) -> EncodeResult:
        """The embeddings of an item, under the name that it has with these weights and numerics: cached, from a call in
        progress, or made now; retained for `retain_s` seconds.

        Raises Overloaded while everything cached is retained or shared memory is full, TooLarge where it could never
        hold the item, Precondition when the rows are not those promised, and what the pixels' source raises.
        """
        name = embedding_name(content, media.digest, numerics)
        ref = self._cache.find(name, retain_s)
        self._measures.queries += 1
        if ref is not None or name in self._encoding:
            self._measures.hits += 1
        if ref is not None:
            _check_rows(media, ref)
            return EncodeResult(ref, cached=True, encode_us=0)
        made = await self._encoding.run(name, lambda: self._make(media, name, retain_s))
        self._cache.find(name, retain_s)
        _check_rows(media, made.ref)
        return made

    def release(self, name: bytes) -> None:
        """Ends the retention of an artifact."""
        self._cache.release(name)

    async def close(self) -> None:
        """Cancels what is being encoded."""
        await self._encoding.close()

    async def _make(self, media: MediaItem, name: bytes, retain_s: float) -> EncodeResult:
        reserved = media.rows * self._row_bytes
        try:
            self._cache.reserve(reserved)
        except Overloaded:
            self._measures.refused += 1
            raise
        place = self._store.reserve(name)
        try:
            # Before they are mapped: what waits here must not take the memory of what is encoded.
            async with self._mapped.held(media.pixels.size_bytes):
                encoded = await self._encoded(media, place, reserved)
            ref = self._store.adopt(place)
        except BaseException as error:
            # Its frames have the pixels mapped, and an error may live until garbage is collected.
            traceback.clear_frames(error.__traceback__)
            self._cache.cancel(reserved)
            self._store.discard(place)
            if isinstance(error, BadPixels):
                raise Precondition("MEDIA_MISMATCH", str(error)) from error
            raise
        self._cache.add(ref, reserved, retain_s)
        return EncodeResult(
            ref,
            cached=False,
            encode_us=encoded.encode_us,
            queue_us=encoded.queue_us,
            items=encoded.items,
        )

    async def _encoded(self, media: MediaItem, place: Reservation, reserved: int) -> Encoded:
        pixels = await self._source.get(media)
        both = pixels.nbytes + reserved
        self._store.space.require_possible(both, "its pixel values and embeddings")
        await place.allocate(reserved)
        return await self._queue.encode(item_of(media, pixels), place)


def item_of(media: MediaItem, pixels: Array) -> Item:
    """An item and its artifact as encoders take them. Raises BadPixels for an artifact of another form."""
    grid, modality = (media.grid_t, media.grid_h, media.grid_w), modality_of(media)
    if media.format == PixelFormat.PIXEL_FORMAT_BUNDLE:
        try:
            tensors = bundle.unpack(pixels)
            return Item(tensors, grid, media.height, media.width, modality=modality)
        except ValueError as error:
            raise BadPixels(str(error)) from error
    scaling = None
    if pixels.dtype == np.uint8 and media.HasField("scaling"):
        given = media.scaling
        scaling = PixelScaling(given.factor, tuple(given.mean), tuple(given.std))
    elif pixels.dtype != np.float32:
        raise BadPixels(f"pixels of {pixels.dtype} whose item names no scaling")
    return pixel_item(pixels, grid, media.height, media.width, scaling, modality)


def _check_rows(media: MediaItem, ref: ArtifactRef) -> None:
    if ref.shape[0] != media.rows:
        raise Precondition(
            "MEDIA_MISMATCH",
            f"the tower gives {ref.shape[0]} rows where the prompt expects {media.rows}:"
            " preprocess and encoder do not serve the same checkpoint",
        )
