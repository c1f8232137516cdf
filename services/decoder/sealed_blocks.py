"""Blocks whose content has a name: the prefix cache as it survives a change of schedulers."""

import numpy as np

from services.decoder.plan import HASH_BYTES

Blocks = np.ndarray[tuple[int], np.dtype[np.int32]]


class SealedBlocks:
    """The hash of each block that is full of committed tokens, until something overwrites it."""

    def __init__(self, num_blocks: int) -> None:
        self._valid = np.zeros(num_blocks, bool)
        self._hashes = np.zeros((num_blocks, HASH_BYTES), np.uint8)

    def seal(self, blocks: Blocks, hashes: bytes) -> None:
        """Names blocks; 16 bytes each."""
        if len(blocks):
            self._valid[blocks] = True
            self._hashes[blocks] = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)

    def overwrite(self, blocks: "np.ndarray[tuple[int], np.dtype[np.int64]] | Blocks") -> None:
        """Their content is another now."""
        self._valid[blocks] = False

    def list(self) -> tuple[bytes, bytes]:
        """Ids (int32) and hashes, in the same order."""
        blocks = np.flatnonzero(self._valid)
        return blocks.astype("<i4").tobytes(), self._hashes[blocks].tobytes()
