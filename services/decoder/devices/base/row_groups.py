"""Rows of a batch that attention can run as one padded batch of matrices."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

# Keys are padded to a multiple of this; see `cpu.py` on why the padding leaves every bit alone.
KEY_TILE = 64
# More queries than this of one row are run in pieces: bounds the scores, and skips later keys.
MAX_QUERIES = 128
# Rows with fewer keys than this share a group whatever their lengths.
_SMALL = 256


@dataclass(frozen=True)
class RowGroup:
    """g rows (or pieces of rows) with at most Q queries and K keys each."""

    tokens: slice | Tensor  # which tokens of the batch: g of them if Q is 1, else index [g * Q]
    blocks: Tensor  # int32 [g * K / block_size], padded with block 0
    starts: Tensor  # [g, 1]: position of each row's first query
    queries: int  # Q
    keys: int  # K
    kept: Tensor | None  # which of the g * Q queries are real; None if all are
    targets: Tensor | None  # where those go in the output; None: to `tokens`
    # What the layers of a step share: masks, and memory that each of them fills anew.
    scratch: dict[object, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """g."""
        return self.starts.shape[0]

    def hidden(self, window: int | None, share: int, padded: int) -> Tensor:
        """Keys that a query must not see: bool [1, g, padded, K], for `share` heads of queries to
        one of keys; padding sees everything."""
        key = ("hidden", window, share, padded)
        mask = self.scratch.get(key)
        if mask is None:
            positions = (self.starts + torch.arange(self.queries))[:, :, None]
            keys = torch.arange(self.keys)
            some = keys > positions
            if window is not None:
                some |= keys <= positions - window
            mask = torch.zeros((1, self.rows, padded, self.keys), dtype=torch.bool)
            mask[0, :, : self.queries * share] = some.repeat_interleave(share, 1)
            self.scratch[key] = mask
        return mask

    def query_memory(self, num_kv: int, padded: int, like: Tensor) -> Tensor:
        """[num_kv, g, padded, D]; whoever fills it leaves the padding zero."""
        key = ("queries", num_kv, padded)
        memory = self.scratch.get(key)
        if memory is None:
            memory = like.new_zeros((num_kv, self.rows, padded, like.shape[-1]))
            self.scratch[key] = memory
        return memory


@dataclass(frozen=True)
class _Piece:
    """Consecutive queries of one row."""

    row: int
    token: int  # the first query's place in the batch
    count: int
    start: int  # the first query's position in the sequence


def group_rows(
    counts: Sequence[int],
    kv_lens: Sequence[int],
    block_table: "np.ndarray[tuple[int, int], np.dtype[np.int32]]",
    block_size: int,
) -> list[RowGroup]:
    """Groups rows so that padding at most doubles the work. Rows of one query come first."""
    groups: list[RowGroup] = []
    decodes = 0
    while decodes < len(counts) and counts[decodes] == 1:
        decodes += 1
    if decodes:
        groups += _group_decodes(np.asarray(kv_lens[:decodes]), block_table, block_size)
    together: dict[tuple[int, int], list[_Piece]] = {}
    token = decodes
    for row in range(decodes, len(counts)):
        start = kv_lens[row] - counts[row]
        for offset in range(0, counts[row], MAX_QUERIES):
            count = min(MAX_QUERIES, counts[row] - offset)
            piece = _Piece(row, token + offset, count, start + offset)
            together.setdefault((_bucket(count), _bucket(piece.start + count)), []).append(piece)
        token += counts[row]
    groups += [_group_pieces(pieces, block_table, block_size) for pieces in together.values()]
    return groups


def _bucket(length: int) -> int:
    return max(0, (length - 1) // 16).bit_length()


def _group_decodes(
    kv_lens: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    block_table: "np.ndarray[tuple[int, int], np.dtype[np.int32]]",
    block_size: int,
) -> list[RowGroup]:
    groups = []
    longest = int(kv_lens.max())
    if longest <= _SMALL or len(kv_lens) == 1:
        members: list[np.ndarray[tuple[int], np.dtype[np.int64]] | None] = [None]
    else:
        sizes = np.ceil(np.log2(np.maximum(kv_lens, _SMALL) / _SMALL))
        members = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
    for rows in members:
        lengths = kv_lens if rows is None else kv_lens[rows]
        keys, blocks = _pad_blocks(
            block_table[: len(kv_lens)] if rows is None else block_table[rows],
            int(lengths.max()),
            block_size,
        )
        groups.append(
            RowGroup(
                tokens=slice(0, len(kv_lens)) if rows is None else torch.from_numpy(rows),
                blocks=blocks,
                starts=torch.from_numpy(lengths - 1)[:, None],
                queries=1,
                keys=keys,
                kept=None,
                targets=None,
            )
        )
    return groups


def _group_pieces(
    pieces: list[_Piece],
    block_table: "np.ndarray[tuple[int, int], np.dtype[np.int32]]",
    block_size: int,
) -> RowGroup:
    counts = np.asarray([piece.count for piece in pieces])[:, None]
    queries = int(counts.max())
    order = np.arange(queries)[None, :]
    first = np.asarray([piece.token for piece in pieces])[:, None]
    # A row shorter than the longest repeats its last query; the result is thrown away.
    tokens = first + np.minimum(order, counts - 1)
    real = (order < counts).reshape(-1)
    longest = max(piece.start + piece.count for piece in pieces)
    keys, blocks = _pad_blocks(block_table[[piece.row for piece in pieces]], longest, block_size)
    return RowGroup(
        tokens=torch.from_numpy(tokens.reshape(-1)),
        blocks=blocks,
        starts=torch.tensor([[piece.start] for piece in pieces]),
        queries=queries,
        keys=keys,
        kept=torch.from_numpy(np.flatnonzero(real)),
        targets=torch.from_numpy(tokens.reshape(-1)[real]),
    )


def _pad_blocks(
    table: "np.ndarray[tuple[int, int], np.dtype[np.int32]]", longest: int, block_size: int
) -> tuple[int, Tensor]:
    """Number of keys after padding, and the blocks that hold them, row after row."""
    tile = max(KEY_TILE, block_size)
    keys = -(-longest // tile) * tile
    width = keys // block_size
    padded = np.zeros((table.shape[0], width), np.int32)
    have = min(width, table.shape[1])
    padded[:, :have] = table[:, :have]
    return keys, torch.from_numpy(padded.reshape(-1))
