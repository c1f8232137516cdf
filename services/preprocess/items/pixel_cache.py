"""Pixel values by digest: concurrent requests for one image share its processing, later ones its result."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from services.preprocess.media.made_item import MadeItem
from services.preprocess.worker.pool import ImageWorkerPool, ProcessorInfo
from shared.artifacts.file import DIGEST_BYTES
from shared.artifacts.store import ArtifactStore
from shared.environment import monotonic
from shared.net.single_flight import SingleFlight
from tessera.artifact.v1.artifact_pb2 import ArtifactRef
from tessera.common.v1.media_pb2 import Modality

_HANDED_S = 0.5  # from an answer with pixel values to their being mapped


@dataclass(frozen=True)
class Pixels:
    """Pixel values of one media item, and what else is known of it."""

    ref: ArtifactRef
    item: MadeItem


class _Entries:
    """Least recently used entries go first, from the store too; consumers that have mapped one keep it.

    `limit_bytes` and the store's share of shared memory bound them; one picture may be larger, it is the only one then.
    """

    def __init__(self, store: ArtifactStore, limit_bytes: int) -> None:
        self._store = store
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, Pixels] = OrderedDict()
        self._bytes = 0
        self._handed_until: dict[bytes, float] = {}
        store.space.evict = self.evict_one

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes

    def get(self, digest: bytes) -> Pixels | None:
        """The entry, now the most recently used."""
        if digest in self._entries:
            self._entries.move_to_end(digest)
        return self._entries.get(digest)

    def hand_out(self, digest: bytes) -> None:
        """It stays for a moment, in which who asked for it maps it."""
        self._handed_until[digest] = monotonic() + _HANDED_S

    def add(self, digest: bytes, pixels: Pixels) -> None:
        """Adds an entry, evicting others where they are too many bytes together."""
        self._bytes += pixels.ref.size_bytes
        limit = self._store.space.kept_bytes(self._limit_bytes)
        while self._bytes > limit and self.evict_one():
            pass
        self._entries[digest] = pixels

    def evict_one(self) -> int:
        """Evicts the least recently used; its bytes, 0 where there is none that may go now."""
        now = monotonic()
        self._handed_until = {d: until for d, until in self._handed_until.items() if until > now}
        for digest in self._entries:
            if digest not in self._handed_until:
                size = self._entries.pop(digest).ref.size_bytes
                self._bytes -= size
                self._store.evict(digest)
                return size
        return 0


class PixelCache:
    """Pixel values of images, made at most once at a time; the least recently used are evicted over `limit_bytes`."""

    def __init__(self, pool: ImageWorkerPool, store: ArtifactStore, limit_bytes: int) -> None:
        self._pool = pool
        self._store = store
        self._entries = _Entries(store, limit_bytes)
        self._processing: SingleFlight[bytes, Pixels] = SingleFlight()
        self._settings = settings_fingerprint(pool.info)
        self.scaling = pool.info.scaling
        self.bundles = pool.bundles
        self.processed = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pixel values that are kept."""
        return self._entries.nbytes

    def digest(self, source_digest: bytes) -> bytes:
        """16 bytes that name the pixels and embeddings of raw media under this processor's settings."""
        joined = source_digest + self._settings
        return hashlib.blake2b(joined, digest_size=DIGEST_BYTES).digest()

    def find(self, digest: bytes) -> Pixels | None:
        """The cached pixel values, now the most recently used; None if there are none."""
        return self._entries.get(digest)

    async def get(
        self, digest: bytes, data: bytes, modality: Modality.ValueType, tenant: str = ""
    ) -> Pixels:
        """The pixel values of the file `data`, an item of this modality: from the cache, from a call in progress, or
        made now within the tenant's budget.

        Raises InvalidRequest (without a field), TooLarge where shared memory could never hold them, Overloaded when it
        is full or the tenant's budget is spent.
        """
        entry = self.find(digest)
        if entry is not None:
            return entry
        return await self._processing.run(
            digest, lambda: self._make(digest, data, modality, tenant)
        )

    async def hand_out(
        self, digest: bytes, data: Callable[[], Awaitable[tuple[bytes, Modality.ValueType]]]
    ) -> Pixels:
        """The same for a process that asks for them again: they stay for a moment, in which it maps them."""
        found = self.find(digest)
        pixels = found if found is not None else await self.get(digest, *await data())
        self._entries.hand_out(digest)
        return pixels

    async def close(self) -> None:
        """Cancels what is being processed."""
        await self._processing.close()

    async def _make(
        self, digest: bytes, data: bytes, modality: Modality.ValueType, tenant: str
    ) -> Pixels:
        place = self._store.reserve(digest)
        try:
            item = await self._pool.process(data, modality, place, tenant)
        except BaseException:
            self._store.discard(place)
            raise
        entry = Pixels(self._store.adopt(place), item)
        self._entries.add(digest, entry)
        self.processed += 1
        return entry


def settings_fingerprint(info: ProcessorInfo) -> bytes:
    """16 bytes over every setting that pixel values depend on; equal in all replicas."""
    scaling = None if info.scaling is None else asdict(info.scaling)
    text = json.dumps([info.settings, info.shape, scaling, "rgb on white, upright"], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
