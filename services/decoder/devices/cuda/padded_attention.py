"""Attention by torch's `scaled_dot_product_attention`: rows of about the same size as one padded batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.steps.attention_meta import AttnMeta, PagedKV

_MOST_QUERIES = (
    256  # of a piece of a prompt: bounds the mask, and what is computed for queries that are hidden
)
_MOST_ELEMENTS = 1 << 26  # of the mask of a batch, and of its keys


@dataclass(frozen=True)
class _Piece:
    """Consecutive queries of a row: `first` is the place of the first in the step, `start` its position."""

    row: int
    first: int
    count: int
    start: int

    @property
    def end(self) -> int:
        """Keys that its last query sees."""
        return self.start + self.count


def attend(
    q: Tensor, kv: PagedKV, meta: AttnMeta, out: Tensor, scale: float, window: int | None
) -> None:
    """Fills `out` [T, num_q, D of v] for queries q [T, num_q, D] and caches [blocks, block_size, num_kv, D], where the
    meta has its `lengths` on the device, int64 [rows]."""
    if meta.num_decodes:
        out[: meta.num_decodes] = _decodes(q, kv, meta, scale, window)
    _prompts(q, kv, meta, out, scale, window)


def _decodes(q: Tensor, kv: PagedKV, meta: AttnMeta, scale: float, window: int | None) -> Tensor:
    """Rows of one token, padded to the longest: [num_decodes, num_q, D of v]."""
    n = meta.num_decodes
    width = -(-max(meta.kv_lens[:n]) // kv.k.shape[1])
    blocks = meta.block_table[:n, :width].long()
    keys, values = (x[blocks].flatten(1, 2) for x in (kv.k, kv.v))
    ends: Tensor = meta.device_state["lengths"][:n, None]
    order = torch.arange(keys.shape[1], device=q.device)[None, :]
    mask = order < ends
    if window is not None:
        mask &= order >= ends - window
    # Behind the mask lies what others left; zero weight does not undo a NaN.
    values = values.masked_fill(~mask[:, :, None, None], 0)
    # Query heads that share keys are rows of one product, as nothing is hidden from one of them alone.
    groups = q[:n].unflatten(1, (keys.shape[2], -1))
    mixed = F.scaled_dot_product_attention(
        groups,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask[:, None, None, :],
        scale=scale,
    )
    return mixed.flatten(1, 2)


def _prompts(
    q: Tensor, kv: PagedKV, meta: AttnMeta, out: Tensor, scale: float, window: int | None
) -> None:
    """Fills `out` [T, num_q, D of v] for rows of more than one token."""
    for pieces in _batches(meta):
        queries, longest = max(piece.count for piece in pieces), max(piece.end for piece in pieces)
        step = torch.tensor(
            [[p.row, p.first, p.count, p.start] for p in pieces], dtype=torch.int64
        ).T.to(q.device)
        rows, first, count, start = step[:, :, None]
        order = torch.arange(queries, device=q.device)[None, :]
        # A piece shorter than the longest repeats its last query; the result is thrown away.
        tokens = first + torch.minimum(order, count - 1)
        positions = start + torch.minimum(order, count - 1)
        width = -(-longest // kv.k.shape[1])
        blocks = meta.block_table[rows[:, 0], :width].long()
        keys, values = (x[blocks].flatten(1, 2)[:, :longest] for x in (kv.k, kv.v))
        places = torch.arange(longest, device=q.device)
        mask = places <= positions[:, :, None]
        if window is not None:
            mask &= places > positions[:, :, None] - window
        values = values.masked_fill((places >= start + count)[:, :, None, None], 0)
        mixed = _attend(q[tokens], keys, values, mask[:, None], scale)
        out[tokens.flatten()] = mixed.flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[n, queries, num_q, D] with keys and values [n, keys, num_kv, D]."""
    shared = q.shape[2] // k.shape[2]
    if shared > 1:  # with `enable_gqa` and a mask torch has no fused kernel
        k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return mixed.transpose(1, 2)


def _batches(meta: AttnMeta) -> Iterator[list[_Piece]]:
    """Pieces whose numbers of queries and of keys are at most twice those of the others."""
    together: dict[tuple[int, int], list[_Piece]] = {}
    for piece in _pieces(meta):
        sizes = piece.count.bit_length(), piece.end.bit_length()
        together.setdefault(sizes, []).append(piece)
    for pieces in together.values():
        yield from _bounded(pieces)


def _pieces(meta: AttnMeta) -> Iterator[_Piece]:
    for row in range(meta.num_decodes, meta.n):
        first, count = meta.cu_q[row], meta.cu_q[row + 1] - meta.cu_q[row]
        start = meta.kv_lens[row] - count
        for offset in range(0, count, _MOST_QUERIES):
            some = min(_MOST_QUERIES, count - offset)
            yield _Piece(row, first + offset, some, start + offset)


def _bounded(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """As many at once as there is memory for."""
    queries, keys = max(p.count for p in pieces), max(p.end for p in pieces)
    each = max(1, _MOST_ELEMENTS // (max(queries, 1024) * keys))
    for first in range(0, len(pieces), each):
        yield list(pieces[first : first + each])
