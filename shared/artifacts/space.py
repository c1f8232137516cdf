"""The memory that the artifacts of one folder share: what a producer may keep there, and how it gets room for one more.

Producers of one host write into the same file system, often one of shared memory that is small (Docker gives a
container 64 MiB). Each keeps at most its share. Bytes are allocated before they are written; where that fails, the
producer evicts what nobody needs, first its own and then, by asking them (`neighbours`), that of the others.
"""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from shared.artifacts.file import HEADER_BYTES
from shared.errors import Overloaded, ServingError, TooLarge, Unavailable

log = structlog.get_logger(__name__)

NO_SPACE = "ARTIFACT_SPACE"
LOCK = "lock"  # of a producer's folder; its content is the producer's address

# Of the file system: what producers keep, and the rest, for what is being made and for what consumers still have
# mapped, which takes memory after its eviction.
_KEPT = 3 / 4
_IN_USE = 1 - _KEPT
# One of pixel values and one of embeddings, though they do not start together.
_FEWEST_PRODUCERS = 2
PATIENCE_S = 5.0
_PAUSE_S = 0.05  # memory comes back when consumers end their mappings
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


def capacity(folder: Path) -> int | None:
    """Bytes that the file system of a folder can hold, full or not; None where it sets no limit."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize or None


def out_of_space(error: OSError, path: Path) -> ServingError:
    """What a failed write of an artifact means to the caller."""
    if error.errno in _FULL:
        return Overloaded(
            NO_SPACE,
            f"no space left for artifacts in {path.parent.parent}:"
            " give shared memory more room or lower the cache sizes",
            retry_after_s="1",
        )
    return Unavailable("ARTIFACT_UNWRITABLE", f"cannot write {path.parent}: {error.strerror}")


class ArtifactSpace:
    """One producer's part in the file system of `root`.

    `evict`, set by who decides what is kept, removes the artifact that is needed least and returns its bytes, 0 where
    all are needed. `ask`, set where producers can be called, has the others evict so many bytes.
    """

    def __init__(self, root: Path, patience_s: float = PATIENCE_S) -> None:
        """For memory it waits `patience_s`."""
        self._root = root
        self._patience_s = patience_s
        self.evict: Callable[[], int] = lambda: 0
        self.ask: Callable[[int], Awaitable[None]] = _ask_nobody
        # One at a time, in order of arrival: small ones do not starve a large one.
        self._turn = asyncio.Lock()

    def kept_bytes(self, wanted: int) -> int:
        """How many bytes this producer may keep, of those that its settings allow: no more than its share."""
        return min(wanted, self._share(_KEPT))

    def in_use_bytes(self) -> int:
        """How many bytes of other producers this one may have mapped at a time."""
        return self._share(_IN_USE)

    def warn_if_small(self, flag: str, wanted: int) -> None:
        """Logs a warning where the file system is too small for what the settings allow."""
        kept = self.kept_bytes(wanted)
        if kept < wanted:
            log.warning(
                "shared memory is too small for the cache: less is kept, and media are made again",
                folder=str(self._root),
                total_bytes=capacity(self._root),
                flag=flag,
                wanted_bytes=wanted,
                kept_bytes=kept,
            )

    def require_possible(self, payload_bytes: int, what: str = "its values") -> None:
        """Raises TooLarge for what is too large even for an empty file system."""
        total = capacity(self._root)
        if total is None or HEADER_BYTES + payload_bytes <= total - self._overhead():
            return
        raise TooLarge(
            "MEDIA_OVER_SHARED_MEMORY",
            f"the picture or video is too large for this server: {what} take {payload_bytes} bytes, and"
            f" {self._root} has {total}. Send a smaller one, or give shared memory more room",
        )

    async def allocate(self, descriptor: int, payload_bytes: int, path: Path) -> None:
        """Gives an empty file at `path` the memory of an artifact, so that writing cannot fail for lack of it.

        Waits some seconds for memory. Raises TooLarge, Overloaded where there is none, Unavailable for other faults.
        """
        self.require_possible(payload_bytes)
        size = HEADER_BYTES + payload_bytes
        deadline = asyncio.get_running_loop().time() + self._patience_s
        async with self._turn:
            asked = False
            while (problem := await self._allocated(descriptor, size)) is not None:
                late = asyncio.get_running_loop().time() >= deadline
                if problem.errno not in _FULL or (asked and late):
                    raise out_of_space(problem, path) from problem
                if self.evict():
                    continue
                if asked:
                    await asyncio.sleep(_PAUSE_S)
                await self.ask(size)
                asked = True

    def make_room(self, size: int) -> None:
        """Evicts what nobody needs, for another producer, until `size` bytes are free or all that is left is needed."""
        freed = 0
        while freed < size and (evicted := self.evict()):
            freed += evicted

    async def _allocated(self, descriptor: int, size: int) -> OSError | None:
        try:
            await asyncio.to_thread(os.posix_fallocate, descriptor, 0, size)
        except OSError as error:
            return error
        return None

    def _share(self, part: float) -> int:
        """This producer's share of a part of the file system."""
        total = capacity(self._root)
        if total is None:
            return 1 << 62
        return int((total - self._overhead()) * part / max(self._producers(), _FEWEST_PRODUCERS))

    def _producers(self) -> int:
        with os.scandir(self._root) as entries:
            return sum(entry.is_dir(follow_symlinks=False) for entry in entries)

    def _overhead(self) -> int:
        """Bytes of the locks: a page for each producer."""
        return self._producers() * HEADER_BYTES


async def _ask_nobody(size: int) -> None:
    """Where there is no other producer."""
