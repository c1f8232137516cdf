"""Hashes of full blocks: the part of the prefix cache that survives a change of schedulers."""

import numpy as np

from services.decoder.worker.slots.slots import SlotTable
from shared.block_hash import HASH_BYTES, block_names

Blocks = np.ndarray[tuple[int], np.dtype[np.int32]]


class SealedBlocks:
    """The hash of each block that is full of committed tokens, until something overwrites it."""

    def __init__(self, num_blocks: int) -> None:
        self._valid = np.zeros(num_blocks, bool)
        self._hashes = np.zeros((num_blocks, HASH_BYTES), np.uint8)

    def seal(self, blocks: Blocks, hashes: bytes) -> None:
        """Records the hashes of blocks, 16 bytes each."""
        if len(blocks):
            self._valid[blocks] = True
            self._hashes[blocks] = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)

    def overwrite(self, blocks: "np.ndarray[tuple[int], np.dtype[np.int64]] | Blocks") -> None:
        """Forgets the hashes of blocks whose content changes."""
        self._valid[blocks] = False

    def list(self) -> tuple[bytes, bytes]:
        """Ids (int32) and hashes, in the same order."""
        blocks = np.flatnonzero(self._valid)
        return blocks.astype("<i4").tobytes(), self._hashes[blocks].tobytes()

    def complete(self, slots: SlotTable) -> None:
        """Hashes the full blocks after the last hashed one of each sequence: a block's content follows from its tokens,
        whether the scheduler has received them or not."""
        for slot in np.flatnonzero(slots.known & ~slots.failed).tolist():
            size = slots.block_size
            full = int(slots.computed[slot]) // size
            if not 0 < full <= slots.table_len[slot]:
                continue
            blocks = slots.table[slot, :full]
            named = np.flatnonzero(self._valid[blocks])
            begin = int(named[-1]) + 1 if len(named) else 0
            parent = slots.root_name[slot]
            if begin:
                parent = self._hashes[blocks[begin - 1]].tobytes()
            # Placeholder ids do not identify media, and may have been clamped into the vocabulary.
            media_end = max((span.end for span in slots.media.get(slot, ())), default=0)
            if begin == full or not parent or begin * size < media_end:
                continue
            ids = slots.tokens[slot, begin * size : full * size].astype("<i4").tobytes()
            names = block_names(parent, ids, size)
            self.seal(blocks[begin:], b"".join(names))
