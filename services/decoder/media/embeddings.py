"""Embeddings of media, pulled in the background and kept while a sequence may need them."""

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import structlog
import torch
from torch import Tensor

from shared.artifacts.store import ArtifactReader
from shared.errors import Precondition
from tessera.artifact.v1.artifact_pb2 import ArtifactRef

log = structlog.get_logger(__name__)


class Embeddings:
    """Artifacts by digest, as tensors [rows, hidden] in the model's type on its device.

    `start` and `listen` are called on the event loop, everything else by the compute thread. An
    artifact is held from its fetch until it is released, and while a sequence names it; then it
    stays as long as all bytes are within `spare_bytes`, the least recently used going first.
    """

    def __init__(
        self,
        reader: ArtifactReader,
        copy_in: Callable[[Tensor], Tensor],
        spare_bytes: int,
    ) -> None:
        """copy_in: see `Device.copy_in`."""
        self._reader = reader
        self._copy_in = copy_in
        self._spare_bytes = spare_bytes
        self._lock = threading.Lock()
        self._tensors: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._pulling: dict[bytes, asyncio.Task[None]] = {}
        self._held: set[bytes] = set()  # fetched and not released
        self._coming: Counter[bytes] = Counter()  # fetches of plans that are not applied yet
        self._users: Counter[bytes] = Counter()  # sequences by digest
        self._ready: list[bytes] = []
        self._lost: list[bytes] = []
        self._unusable: dict[bytes, Precondition] = {}
        self._on_news: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes of all that are here."""
        return self._bytes

    def listen(self, on_news: Callable[[], None]) -> None:
        """Calls `on_news` on the event loop when there is something to report, in place of who
        listened before: a scheduler that waits for nothing else must not wait for a step."""
        self._on_news = on_news

    def start(self, ref: ArtifactRef) -> None:
        """Begins to pull an artifact that is not here; says so in the next report."""
        digest = bytes(ref.digest)
        with self._lock:
            self._coming[digest] += 1
            if digest in self._tensors:
                self._tensors.move_to_end(digest)
                self._settle(digest)
                return
            if digest not in self._pulling:
                self._pulling[digest] = asyncio.get_running_loop().create_task(self._pull(ref))

    def hold(self, digests: Iterable[bytes]) -> None:
        """These were fetched by the plan that is applied now, whatever earlier plans released."""
        with self._lock:
            for digest in digests:
                self._held.add(digest)
                self._coming[digest] -= 1
                if self._coming[digest] <= 0:
                    del self._coming[digest]

    def use(self, digests: Iterable[bytes]) -> None:
        """A sequence that names these is known now."""
        with self._lock:
            self._users.update(digests)

    def unuse(self, digests: Iterable[bytes]) -> None:
        """A sequence that named these is gone."""
        with self._lock:
            for digest in digests:
                self._users[digest] -= 1
                if self._users[digest] <= 0:
                    del self._users[digest]
            self._evict()

    def release(self, digests: Iterable[bytes]) -> None:
        """No planned sequence needs these any more."""
        with self._lock:
            self._held.difference_update(digests)
            self._evict()

    def rows(self, digest: bytes, first: int, last: int, promised: int, width: int) -> Tensor:
        """Rows [first, last) of an artifact, [last - first, width] on the model's device in its type. Raises
        Precondition if it is away or not as promised.

        promised: number of rows the sequence counts on; width: of one row.
        """
        with self._lock:
            tensor = self._tensors.get(digest)
            if tensor is not None:
                self._tensors.move_to_end(digest)
            unusable = self._unusable.get(digest)
        if unusable is not None:
            raise unusable
        if tensor is None:
            raise Precondition(
                "MEDIA_NOT_READY",
                f"embedding {digest.hex()} is not on this decoder: fetch it first",
            )
        if tuple(tensor.shape) != (promised, width):
            raise Precondition(
                "MEDIA_MISMATCH",
                f"embedding {digest.hex()} has shape {list(tensor.shape)}; the prompt and the model"
                f" ask for {[promised, width]}",
            )
        return tensor[first:last]

    def report(self) -> tuple[list[bytes], list[bytes]]:
        """Digests that became ready, and those that could not be had, since the last report."""
        with self._lock:
            ready, self._ready = self._ready, []
            lost, self._lost = self._lost, []
        return ready, lost

    def forget_sequences(self) -> None:
        """Forgets which embeddings are needed: a new scheduler has none. They stay until their memory is needed."""
        with self._lock:
            self._users.clear()
            self._held.clear()
            self._coming.clear()
            self._ready.clear()
            self._lost.clear()
            self._unusable.clear()
            self._evict()

    async def close(self) -> None:
        """Stops what is being pulled."""
        tasks = list(self._pulling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reader.close()

    async def _pull(self, ref: ArtifactRef) -> None:
        digest = bytes(ref.digest)
        try:
            array = await self._reader.open(ref)
            tensor = await asyncio.to_thread(self._take_over, array, ref)
        except Precondition as error:  # whole, but not what was promised: sequences say so
            with self._lock:
                self._unusable[digest] = error
                self._settle(digest)
        except Exception as error:
            log.warning("embedding is lost", digest=digest.hex(), error=str(error))
            with self._lock:
                self._held.discard(digest)
                self._settle(digest, lost=True)
        else:
            with self._lock:
                self._unusable.pop(digest, None)
                self._tensors[digest] = tensor
                self._bytes += tensor.nbytes
                self._settle(digest)
                self._evict()
        finally:
            self._pulling.pop(digest, None)
        self._on_news()

    def _settle(self, digest: bytes, lost: bool = False) -> None:
        """Something that was fetched is here, or could not be had; called with the lock held."""
        (self._lost if lost else self._ready).append(digest)

    def _take_over(
        self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", ref: ArtifactRef
    ) -> Tensor:
        """A copy of our own: the producer owes us nothing afterwards."""
        if ref.dtype not in ("float32", "float16", "bfloat16"):
            raise Precondition(
                "MEDIA_MISMATCH", f"embedding {ref.digest.hex()} has element type {ref.dtype!r}"
            )
        own = torch.from_numpy(np.array(array))
        if ref.dtype == "bfloat16":
            own = own.view(torch.bfloat16)
        return self._copy_in(own)

    def _evict(self) -> None:
        for digest in [d for d in self._unusable if not self._is_needed(d)]:
            del self._unusable[digest]
        for digest in list(self._tensors):
            if self._bytes <= self._spare_bytes:
                return
            if not self._is_needed(digest):
                self._bytes -= self._tensors.pop(digest).nbytes

    def _is_needed(self, digest: bytes) -> bool:
        return digest in self._held or digest in self._users or digest in self._coming
