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
        self._young: dict[bytes, list[Holder]] = {}
        self._old: dict[bytes, list[Holder]] = {}

    def find(self, hashes: list[bytes]) -> tuple[list[Holder], int]:
        """Holders of the longest prefix that is known, the latest last, and its blocks; no one and 0 if none is."""
        depth = 1 << len(hashes).bit_length() >> 1
        while depth:
            content = hashes[depth - 1]
            holders = self._young.get(content) or self._old.get(content)
            if holders:
                return holders, depth
            depth >>= 1
        return [], 0

    def add(self, hashes: list[bytes], holder: Holder) -> None:
        """A sequence with these blocks was sent to a holder."""
        depth, last = 1, len(hashes)
        while depth <= last:
            content = hashes[depth - 1]
            holders = self._young.get(content)
            if holders is None:
                holders = self._old.get(content, [])
                self._young[content] = holders
            if not holders or holders[-1] is not holder:
                if holder in holders:
                    holders.remove(holder)
                holders.append(holder)
                if len(holders) > _MOST_HOLDERS:
                    del holders[0]
            depth <<= 1
        if len(self._young) > self.capacity:
            self._old, self._young = self._young, {}
