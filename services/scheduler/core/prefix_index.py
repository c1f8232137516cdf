"""Who was sent which prefix: from a hash to the last few that got it."""

from typing import Generic, TypeVar

Holder = TypeVar("Holder")

_MOST_HOLDERS = 8


class PrefixIndex(Generic[Holder]):
    """A memory of prefixes of 1, 2, 4, 8... blocks, since most of the others are never asked for.

    Bounded: of two generations the older one is forgotten when the younger is full; what is asked for moves to the
    younger one. An entry is a hint, since the holder's cache may have lost the prefix.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity  # entries of a generation
        self._young: dict[bytes, tuple[Holder, ...]] = {}
        self._old: dict[bytes, tuple[Holder, ...]] = {}

    def find(self, hashes: list[bytes]) -> tuple[tuple[Holder, ...], int]:
        """Holders of the longest prefix that is known, the latest last, and its blocks; no one and 0 if none is."""
        depth = 1 << len(hashes).bit_length() >> 1
        while depth:
            content = hashes[depth - 1]
            holders = self._young.get(content) or self._old.get(content)
            if holders:
                return holders, depth
            depth >>= 1
        return (), 0

    def add(self, hashes: list[bytes], holder: Holder) -> None:
        """A sequence with these blocks was sent to a holder."""
        young, old = self._young, self._old
        depth, last = 1, len(hashes)
        while depth <= last:
            content = hashes[depth - 1]
            holders = young.get(content)
            if holders is None:
                holders = young[content] = old.get(content, ())
            if not holders or holders[-1] is not holder:
                others = [other for other in holders if other is not holder]
                young[content] = (*others[1 - _MOST_HOLDERS :], holder)
            depth <<= 1
        if len(young) > self.capacity:
            self._old, self._young = young, {}
