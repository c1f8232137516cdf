"""Which of a step's tokens attend to media, and what they see of them, as arrays for the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.staging import Array
from services.decoder.steps.encoder_keys import AttendingTokens, Longs, NewRows, SeenRows, Stretch
from services.decoder.worker.inputs.media_rows import ReadRows
from services.decoder.worker.inputs.rows import Rows
from services.decoder.worker.slots.encoder_blocks import EncoderBlocks, KeptMedia


@dataclass(frozen=True)
class _Group:
    """Tokens by how many keys they see of those in their blocks, the last `window` ones; 0: all."""

    window: int
    lengths: Sequence[int]  # keys in the blocks of each token


@dataclass(frozen=True)
class Attending:
    """The tokens of one step. `arrays` are sent to the device, in one transfer with the rest of the step."""

    arrays: Sequence[Array]
    groups: Sequence[_Group]
    values: Sequence[Tensor]  # rows of media that are written
    encoder: EncoderBlocks

    def on_device(self, ops: BaseOps, sent: Sequence[Tensor]) -> AttendingTokens:
        """Given `arrays` on the device."""
        tokens, marks = sent[:2]
        of_groups, places = sent[2 : 2 + 3 * len(self.groups)], sent[2 + 3 * len(self.groups) :]
        seen = [
            SeenRows(
                index if len(self.groups) > 1 else None,
                ops.make_meta([1] * len(group.lengths), group.lengths, table, unused),
                group.window or None,
            )
            for group, index, table, unused in zip(
                self.groups, of_groups[::3], of_groups[1::3], of_groups[2::3], strict=True
            )
        ]
        new = [
            NewRows(
                values, ops.make_meta([len(values)], [len(values)], seen[0].meta.block_table, at)
            )
            for values, at in zip(self.values, places, strict=True)
        ]
        return AttendingTokens(self.encoder.caches, new, tokens, marks, seen)


def attending(
    rows: Rows,
    ends: Longs,
    encoder: EncoderBlocks,
    written: Sequence[KeptMedia],
    read: ReadRows,
) -> Attending | None:
    """Of rows that end in the batch at `ends`; None where no token attends. written: what this step writes."""
    size = encoder.block_size
    pieces = list(_pieces(rows, ends, encoder))
    if not pieces:
        return None
    counts = [piece.count for piece in pieces]
    owners = np.repeat(np.arange(len(pieces)), counts)
    windows = np.array([piece.window(size) for piece in pieces], np.int64)
    arrays: list[Array] = [
        np.concatenate([np.arange(piece.token, piece.token + piece.count) for piece in pieces]),
        np.array([piece.stretch.mark for piece in pieces], np.int64)[owners],
    ]
    groups = []
    for window in np.unique(windows).tolist():
        index = np.flatnonzero(windows[owners] == window)
        tables = [pieces[owner].table(size) for owner in owners[index].tolist()]
        table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for line, blocks in zip(table, tables, strict=True):
            line[: len(blocks)] = blocks
        arrays += [index, table, np.zeros(len(index), np.int64)]
        groups.append(
            _Group(window, [pieces[owner].keys(size) for owner in owners[index].tolist()])
        )
    places = [at for kept in written for at in kept.places(size)]
    values = [read(span, 0, span.rows) for kept in written for span in kept.spans]
    return Attending([*arrays, *places], groups, values, encoder)


@dataclass(frozen=True)
class _Piece:
    """Tokens that follow each other and see the same rows of media."""

    token: int  # the first, in the batch
    count: int
    stretch: Stretch
    kept: KeptMedia

    def table(self, size: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        """The blocks in which they see something."""
        return self.kept.blocks[self.stretch.first // size : -(-self.stretch.last // size)]

    def keys(self, size: int) -> int:
        """In these blocks, up to the last one that is seen."""
        return self.stretch.last - self.stretch.first // size * size

    def window(self, size: int) -> int:
        """See `_Group.window`: 0 where the first block's first key is seen."""
        return self.stretch.last - self.stretch.first if self.stretch.first % size else 0


def _pieces(rows: Rows, ends: Longs, encoder: EncoderBlocks) -> Iterator[_Piece]:
    told = zip(
        rows.slot.tolist(), rows.start.tolist(), rows.end.tolist(), ends.tolist(), strict=True
    )
    for slot, start, end, after in told:
        found = encoder.of_slot(slot)
        if found is None:
            continue
        kept, view = found
        token = after - (end - start)
        for stretch, count in view.between(start, end):
            yield _Piece(token, count, stretch, kept)
            token += count
