"""Embeddings where several ranks hold the same ones: a fetch is complete when it is complete everywhere."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from services.decoder.media.embeddings import Embeddings
from services.decoder.parallel.leader import Leader
from shared.artifacts.store import ArtifactReader
from tessera.artifact.v1.artifact_pb2 import ArtifactRef


class NumberedEmbeddings(Embeddings):
    """Numbers fetches in the order in which they begin, which is the same on every rank."""

    def __init__(
        self, reader: ArtifactReader, copy_in: Callable[[Tensor], Tensor], spare_bytes: int
    ) -> None:
        super().__init__(reader, copy_in, spare_bytes)
        self._started = 0
        self._numbers: dict[bytes, list[int]] = {}  # of fetches whose outcome is not known here

    def start(self, ref: ArtifactRef) -> None:
        """See `Embeddings.start`."""
        digest = bytes(ref.digest)
        with self._lock:
            self._started += 1
            self._numbers.setdefault(digest, []).append(self._started)
        super().start(ref)

    def forget_sequences(self) -> None:
        """See `Embeddings.forget_sequences`."""
        super().forget_sequences()
        with self._lock:
            self._numbers.clear()

    def _settle(self, digest: bytes, lost: bool = False) -> None:
        for number in self._numbers.pop(digest, ()):
            self._settle_here(number, digest, lost)

    @abstractmethod
    def _settle_here(self, number: int, digest: bytes, lost: bool) -> None:
        """The outcome of a fetch on this rank; called with the lock held."""


class LeadingEmbeddings(NumberedEmbeddings):
    """The first rank's: reports an artifact when every rank has it, and as lost when one of them could not get it."""

    def __init__(
        self,
        reader: ArtifactReader,
        copy_in: Callable[[Tensor], Tensor],
        spare_bytes: int,
        leader: Leader,
    ) -> None:
        super().__init__(reader, copy_in, spare_bytes)
        self._size = leader.place.size
        self._answers: dict[
            int, list[bool]
        ] = {}  # by number: of each rank that answered whether it was lost there
        self._digests: dict[int, bytes] = {}  # of fetches that are complete here
        self._forgotten = 0  # numbers up to this one belong to sequences that are gone
        self._loop: asyncio.AbstractEventLoop | None = None
        leader.listen(self._answer)

    def start(self, ref: ArtifactRef) -> None:
        """See `Embeddings.start`."""
        self._loop = asyncio.get_running_loop()
        super().start(ref)

    def forget_sequences(self) -> None:
        """See `Embeddings.forget_sequences`."""
        super().forget_sequences()
        with self._lock:
            self._forgotten = self._started
            self._answers.clear()
            self._digests.clear()

    def _settle_here(self, number: int, digest: bytes, lost: bool) -> None:
        self._digests[number] = digest
        self._count(number, lost)

    def _answer(self, rank: int, number: int, lost: bool) -> None:
        """Of another rank, on a thread of its own."""
        with self._lock:
            self._count(number, lost)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self._on_news())

    def _count(self, number: int, lost: bool) -> None:
        if number <= self._forgotten:
            return
        answers = self._answers.setdefault(number, [])
        answers.append(lost)
        if len(answers) == self._size:
            del self._answers[number]
            super(NumberedEmbeddings, self)._settle(self._digests.pop(number), any(answers))


class FollowingEmbeddings(NumberedEmbeddings):
    """Another rank's: tells the first one by a call of `tell` with a fetch's number, and whether it was lost."""

    def __init__(
        self,
        reader: ArtifactReader,
        copy_in: Callable[[Tensor], Tensor],
        spare_bytes: int,
        tell: Callable[[int, bool], None],
    ) -> None:
        super().__init__(reader, copy_in, spare_bytes)
        self._tell = tell

    def _settle_here(self, number: int, digest: bytes, lost: bool) -> None:
        self._tell(number, lost)
