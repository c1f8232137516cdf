"""Blocks of host memory that hold what was swapped out."""

from collections.abc import Iterable


class HostBlocks:
    """Reference counts and a free list. Forks of a swapped-out sequence share its blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now."""
        return len(self._free)

    def refs(self, block: int) -> int:
        """How many hold a block."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Gives out blocks. The caller has checked `num_free`."""
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Takes hold of blocks that somebody else holds."""
        for block in blocks:
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Lets blocks go."""
        for block in blocks:
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)
