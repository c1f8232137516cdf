"""Pixel values by digest: concurrent requests for one image share its processing, later ones its result."""

import hashlib
import json
from dataclasses import asdict, dataclass

from cachetools import LRUCache

from services.preprocess.prompt.prompt_rule import MadeItem
from services.preprocess.worker.pool import ImageWorkerPool, ProcessorInfo
from shared.artifacts.file import DIGEST_BYTES
from shared.artifacts.store import ArtifactStore
from shared.net.single_flight import SingleFlight
from tessera.artifact.v1.artifact_pb2 import ArtifactRef


@dataclass(frozen=True)
class Pixels:
    """Pixel values of one image or video, and what else is known of it."""

    ref: ArtifactRef
    item: MadeItem


class _Entries(LRUCache[bytes, Pixels]):
    """What is evicted is removed from the store too; consumers that have mapped it keep it."""

    def __init__(self, store: ArtifactStore, limit_bytes: int) -> None:
        # One picture may be larger than the limit; it is the only one then.
        limit = max(limit_bytes, 1)
        super().__init__(limit, lambda entry: min(entry.ref.size_bytes, limit))
        self._store = store

    def popitem(self) -> tuple[bytes, Pixels]:
        """Evicts the least recently used."""
        digest, entry = super().popitem()
        self._store.evict(digest)
        return digest, entry


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

    def digest(self, source_digest: bytes) -> bytes:
        """16 bytes that name the pixels and embeddings of raw media under this processor's settings."""
        joined = source_digest + self._settings
        return hashlib.blake2b(joined, digest_size=DIGEST_BYTES).digest()

    def find(self, digest: bytes) -> Pixels | None:
        """The cached pixel values, now the most recently used; None if there are none."""
        return self._entries.get(digest)

    async def get(self, digest: bytes, data: bytes, tenant: str = "") -> Pixels:
        """The pixel values of the image file `data`, from the cache, from a call in progress, or made now within the
        tenant's budget.

        Raises InvalidRequest (without a field), Overloaded when shared memory is full or the tenant's
        budget is spent.
        """
        entry = self.find(digest)
        if entry is not None:
            return entry
        return await self._processing.run(digest, lambda: self._make(digest, data, tenant))

    async def close(self) -> None:
        """Cancels what is being processed."""
        await self._processing.close()

    async def _make(self, digest: bytes, data: bytes, tenant: str) -> Pixels:
        place = self._store.reserve(digest)
        try:
            item = await self._pool.process(data, place, tenant)
        except BaseException:
            self._store.discard(place)
            raise
        entry = Pixels(self._store.adopt(place), item)
        self._entries[digest] = entry
        self.processed += 1
        return entry


def settings_fingerprint(info: ProcessorInfo) -> bytes:
    """16 bytes over every setting that pixel values depend on; equal in all replicas."""
    scaling = None if info.scaling is None else asdict(info.scaling)
    text = json.dumps([info.settings, info.shape, scaling, "rgb on white, upright"], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
