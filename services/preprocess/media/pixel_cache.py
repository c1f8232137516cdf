"""Pixel values by digest: each image is processed once, however often and by however many it is asked for."""

import asyncio
import hashlib
import json
from collections import OrderedDict
from dataclasses import asdict, dataclass

from services.preprocess.worker.pool import ImageWorkerPool, PictureSize, ProcessorInfo
from shared.artifacts.file import DIGEST_BYTES
from shared.artifacts.store import ArtifactStore
from tessera.artifact.v1.artifact_pb2 import ArtifactRef


@dataclass(frozen=True)
class Pixels:
    """Pixel values of one image and the size of the picture they were made of."""

    ref: ArtifactRef
    size: PictureSize


class PixelCache:
    """The least recently used pixel values leave when `limit_bytes` is passed; consumers keep what they have mapped."""

    def __init__(self, pool: ImageWorkerPool, store: ArtifactStore, limit_bytes: int) -> None:
        self._pool = pool
        self._store = store
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._entries: OrderedDict[bytes, Pixels] = OrderedDict()
        self._making: dict[bytes, asyncio.Task[Pixels]] = {}
        self._settings = settings_fingerprint(pool.info)
        self.scaling = pool.info.scaling
        self.processed = 0

    def digest(self, source_digest: bytes) -> bytes:
        """16 bytes that name the pixels and embeddings of raw media under this processor's settings."""
        joined = source_digest + self._settings
        return hashlib.blake2b(joined, digest_size=DIGEST_BYTES).digest()

    def find(self, digest: bytes) -> Pixels | None:
        """What is cached, as the most recently used."""
        entry = self._entries.get(digest)
        if entry is not None:
            self._entries.move_to_end(digest)
        return entry

    async def get(self, digest: bytes, data: bytes, tenant: str = "") -> Pixels:
        """The pixel values of the image file `data`, from the cache, from a call in progress, or made now
        on the tenant's account.

        Raises InvalidRequest (without a field), Overloaded when shared memory is full or the tenant's
        budget is spent.
        """
        entry = self.find(digest)
        if entry is not None:
            return entry
        task = self._making.get(digest)
        if task is None:
            task = self._making[digest] = asyncio.create_task(self._make(digest, data, tenant))
            task.add_done_callback(lambda done: self._made(digest, done))
        # A caller that goes away must not take the work from the others.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends the work that nobody waits for any more."""
        tasks = list(self._making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, digest: bytes, data: bytes, tenant: str) -> Pixels:
        place = self._store.reserve(digest)
        try:
            size = await self._pool.process(data, place, tenant)
        except BaseException:
            self._store.discard(place)
            raise
        entry = Pixels(self._store.adopt(place), size)
        self._entries[digest] = entry
        self._held_bytes += entry.ref.size_bytes
        self.processed += 1
        while self._held_bytes > self._limit_bytes and len(self._entries) > 1:
            oldest, evicted = self._entries.popitem(last=False)
            self._held_bytes -= evicted.ref.size_bytes
            self._store.evict(oldest)
        return entry

    def _made(self, digest: bytes, task: asyncio.Task[Pixels]) -> None:
        del self._making[digest]
        if not task.cancelled():
            task.exception()  # told to every caller; to nobody when all have gone away


def settings_fingerprint(info: ProcessorInfo) -> bytes:
    """16 bytes over everything that decides which pixels come of a picture; equal in all replicas."""
    scaling = None if info.scaling is None else asdict(info.scaling)
    text = json.dumps([info.settings, info.shape, scaling, "rgb on white, upright"], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
