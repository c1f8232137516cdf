"""Keys and values that layers keep of sequences' media, in blocks of their own (`EncoderKeys`).

Sequences with the same media share them, from when the first of these is introduced until the last is dropped. They are
written by the first step that has a row of one, before anything reads them, and never again: a step that is computed a
second time, and a sequence that is computed again from its first token, read what is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.decoder.devices.base.ops import BaseOps
from services.decoder.media.media_spans import MediaSpan
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.layer_spec import EncoderKeys
from services.decoder.steps.attention_meta import PagedKV
from services.decoder.steps.encoder_keys import Longs, MediaView
from services.decoder.worker.slots.kept_by_slot import Introduced, KeptBySlot
from services.decoder.worker.slots.slots import Slots, SlotTable
from shared.errors import Precondition


@dataclass(eq=False)
class KeptMedia:
    """The media of some sequences, in their order, and where their keys are."""

    digests: tuple[bytes, ...]
    spans: tuple[MediaSpan, ...]  # of the first of the sequences
    runs: Sequence[tuple[int, int, int]]  # see `MediaView`
    blocks: "np.ndarray[tuple[int], np.dtype[np.int32]]"
    holders: int = 0
    is_written: bool = False  # by a step that was prepared

    def places(self, size: int) -> list[Longs]:
        """Where in the cache (block * size + offset) each row of each item is: int64 [rows] by item."""
        found = [np.empty(span.rows, np.int64) for span in self.spans]
        kept = 0
        for item, first, count in self.runs:
            rows = np.arange(kept, kept + count)
            found[item][first : first + count] = self.blocks[rows // size] * size + rows % size
            kept += count
        return found


class EncoderBlocks(KeptBySlot):
    """The blocks of all slots. All but `prepare` is called in the order of plans, at their launch."""

    def __init__(
        self,
        layers: Sequence[EncoderKeys],
        ops: BaseOps,
        num_blocks: int,
        slots: SlotTable,
        model: DecoderModel,
    ) -> None:
        """Allocates the blocks of these layers, of which there may be none, beside block 0: padding."""
        self.caches: list[PagedKV] = [ops.alloc_kv(layer, 1 + num_blocks) for layer in layers]
        self.block_size = ops.block_size
        self._slots, self._model = slots, model
        self._free = list(range(num_blocks, 0, -1))
        self._kept: dict[tuple[bytes, ...], KeptMedia] = {}
        self._by_slot: dict[int, tuple[KeptMedia, MediaView]] = {}

    @property
    def empty(self) -> bool:
        """Whether no layer has such keys."""
        return not self.caches

    def of_slot(self, slot: int) -> tuple[KeptMedia, MediaView] | None:
        """What a sequence has, None without media."""
        return self._by_slot.get(slot)

    def unwritten(self, slots: Slots) -> list[KeptMedia]:
        """What of these slots is to be written before it is read, each once."""
        found = (self._by_slot[slot][0] for slot in slots.tolist() if slot in self._by_slot)
        return list(dict.fromkeys(kept for kept in found if not kept.is_written))

    def advance(self, slots: Slots) -> list[KeptMedia]:
        """A step with rows of these slots is about to be computed, and writes what comes back."""
        found = self.unwritten(slots)
        for kept in found:
            kept.is_written = True
        return found

    def go_back(self, written: Sequence[KeptMedia]) -> None:
        """The step that was about to write this is prepared anew."""
        for kept in written:
            kept.is_written = False

    def introduce(self, slot: int, sequence: Introduced) -> None:
        """See `KeptBySlot.introduce`. Raises Precondition where blocks do not suffice: the scheduler counts them."""
        spans = self._slots.media.get(slot, ())
        if self.empty or not spans:
            return
        view = self._model.media_view(sequence.message.prompt_len, sequence.message.media)
        digests = tuple(span.digest for span in spans)
        kept = self._kept.get(digests)
        if kept is None:
            blocks = -(-sum(span.rows for span in spans) // self.block_size)
            if blocks > len(self._free):
                raise Precondition(
                    "TOO_MUCH_MEDIA",
                    f"the media take {blocks} blocks of encoder keys, and {len(self._free)} are free here",
                )
            taken = np.array([self._free.pop() for _ in range(blocks)], np.int32)
            kept = self._kept[digests] = KeptMedia(digests, spans, view.runs, taken)
        kept.holders += 1
        self._by_slot[slot] = kept, view

    def fork(self, child: int, parent: int, choice: int) -> None:
        """See `KeptBySlot.fork`."""
        found = self._by_slot.get(parent)
        if found is not None:
            found[0].holders += 1
            self._by_slot[child] = found

    def drop(self, slot: int) -> None:
        """See `KeptBySlot.drop`."""
        found = self._by_slot.pop(slot, None)
        if found is None:
            return
        kept = found[0]
        kept.holders -= 1
        if not kept.holders:
            self._free.extend(kept.blocks.tolist())
            del self._kept[kept.digests]
