"""Which embeddings are kept: the most recently used, and in any case those that a waiting sequence holds."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from shared.artifacts.store import ArtifactStore
from shared.errors import Overloaded
from tessera.artifact.v1.artifact_pb2 import ArtifactRef

_MAX_HOLD_S = 600.0


@dataclass
class _Entry:
    ref: ArtifactRef
    held_until: float


class EmbeddingCache:
    """Counts the bytes of a store's artifacts and of those being made; both stay under `limit_bytes`.

    A held item is never evicted, so what a sequence waits for cannot be pushed out by what another
    waits for.
    """

    def __init__(
        self, store: ArtifactStore, limit_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bytes = 0

    def find(self, digest: bytes, hold_s: float) -> ArtifactRef | None:
        """The artifact as the most recently used, held from now on."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._entries.move_to_end(digest)
        entry.held_until = max(entry.held_until, self._until(hold_s))
        return entry.ref

    def reserve(self, size_bytes: int) -> None:
        """Makes room for an artifact that will be added, evicting what nobody holds.

        Raises Overloaded when too much is held. One artifact may be over the limit if it is the
        only one.
        """
        now = self._clock()
        free = [digest for digest, entry in self._entries.items() if entry.held_until <= now]
        while self._bytes + size_bytes > self._limit_bytes and free:
            self._evict(free.pop(0))
        if self._bytes and self._bytes + size_bytes > self._limit_bytes:
            raise Overloaded(
                "ENCODER_CACHE_HELD",
                f"embeddings that sequences wait for fill the limit of {self._limit_bytes} bytes"
                " (--encoder-cache-bytes); retry when some are released",
                retry_after_s="1",
            )
        self._bytes += size_bytes

    def cancel(self, size_bytes: int) -> None:
        """Gives room back that `reserve` made."""
        self._bytes -= size_bytes

    def add(self, ref: ArtifactRef, reserved_bytes: int, hold_s: float) -> None:
        """Takes in what room was made for."""
        self._bytes += ref.size_bytes - reserved_bytes
        self._entries[ref.digest] = _Entry(ref, self._until(hold_s))

    def release(self, digest: bytes) -> None:
        """Ends a hold; an unknown digest is ignored."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.held_until = 0.0

    def _evict(self, digest: bytes) -> None:
        self._bytes -= self._entries.pop(digest).ref.size_bytes
        self._store.evict(digest)

    def _until(self, hold_s: float) -> float:
        return self._clock() + min(max(hold_s, 0.0), _MAX_HOLD_S)
