"""Bookkeeping of the embeddings in the artifact store: least recently used ones are evicted, retained ones never."""

from collections import OrderedDict
from dataclasses import dataclass

from shared.artifacts.store import ArtifactStore
from shared.environment import monotonic
from shared.errors import Overloaded
from tessera.artifact.v1.artifact_pb2 import ArtifactRef

_MOST_RETAIN_S = 600.0


@dataclass
class _Entry:
    ref: ArtifactRef
    retained_until: float


class EmbeddingCache:
    """Counts the bytes of a store's artifacts and of those being made; both stay under `limit_bytes` and under the
    store's share of shared memory.

    A retained item is never evicted: embeddings that one sequence waits for cannot push out those of another.
    """

    def __init__(self, store: ArtifactStore, limit_bytes: int) -> None:
        self._store = store
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bytes = 0
        store.space.evict = self.evict_one

    @property
    def nbytes(self) -> int:
        """Bytes of the artifacts, and of those being made."""
        return self._bytes

    def find(self, digest: bytes, retain_s: float) -> ArtifactRef | None:
        """The artifact, now the most recently used and retained for so long, or None."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._entries.move_to_end(digest)
        entry.retained_until = max(entry.retained_until, self._until(retain_s))
        return entry.ref

    def reserve(self, size_bytes: int) -> None:
        """Reserves bytes for an artifact that will be added, evicting what is not retained.

        Raises Overloaded when too much is retained. A single artifact may exceed the limit.
        """
        limit = self._store.space.kept_bytes(self._limit_bytes)
        while self._bytes + size_bytes > limit and self.evict_one():
            pass
        if self._bytes and self._bytes + size_bytes > limit:
            raise Overloaded(
                "ENCODER_CACHE_FULL",
                f"embeddings that sequences wait for fill the limit of {limit} bytes"
                " (--encoder-cache-bytes, or this process's share of shared memory); retry when some are released",
                retry_after_s="1",
            )
        self._bytes += size_bytes

    def cancel(self, size_bytes: int) -> None:
        """Gives back reserved bytes."""
        self._bytes -= size_bytes

    def add(self, ref: ArtifactRef, reserved_bytes: int, retain_s: float) -> None:
        """Adds an artifact for which `reserved_bytes` were reserved."""
        self._bytes += ref.size_bytes - reserved_bytes
        self._entries[ref.digest] = _Entry(ref, self._until(retain_s))

    def release(self, digest: bytes) -> None:
        """Ends an artifact's retention; an unknown digest is ignored."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.retained_until = 0.0

    def evict_one(self) -> int:
        """Evicts the least recently used of those that are not retained; its bytes, 0 where all are."""
        now = monotonic()
        for digest, entry in self._entries.items():
            if entry.retained_until <= now:
                del self._entries[digest]
                self._bytes -= entry.ref.size_bytes
                self._store.evict(digest)
                return entry.ref.size_bytes
        return 0

    def _until(self, retain_s: float) -> float:
        return monotonic() + min(max(retain_s, 0.0), _MOST_RETAIN_S)
