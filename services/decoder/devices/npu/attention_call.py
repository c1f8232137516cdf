"""Which calls of a fused kernel a step's attention takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor

from services.decoder.steps.attention_meta import AttnMeta

Span = tuple[int, int, int]  # row, first position, position after the last
Send = Callable[[np.ndarray[tuple[int, ...], np.dtype[np.int64]]], Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """Sequences of queries, one behind the other. The last query of each sees `kv_lens` keys, those before it one fewer
    each, or where not `causal` all as many."""

    ends: list[int]  # of each sequence in the queries: cumulative, without a leading 0
    kv_lens: list[int]  # not cumulative
    table: Tensor  # int32 [sequences, blocks]
    causal: bool = True
    tokens: Tensor | None = None  # int64: which tokens of the step the queries are; None: all


@dataclass(frozen=True)
class _Piece:
    """Queries of one row that see alike: `count` from token `first` of the step on; the last sees `keys`."""

    row: int
    first: int
    count: int
    keys: int


def attention_calls(meta: AttnMeta, send: Send) -> list[AttentionCall]:
    """One call for all rows; with spans that see each other whole two, for what lies between spans and for spans.

    send: a host array to the device.
    """
    if not meta.bidirectional:
        return [AttentionCall(meta.cu_q[1:], meta.kv_lens, meta.block_table)]
    between, whole = _cut(meta, meta.bidirectional)
    calls = []
    for pieces, causal in ((between, True), (whole, False)):
        if not pieces:
            continue
        tokens = np.concatenate([np.arange(p.first, p.first + p.count) for p in pieces])
        rows = send(np.asarray([piece.row for piece in pieces], np.int64))
        calls.append(
            AttentionCall(
                ends=list(accumulate(piece.count for piece in pieces)),
                kv_lens=[piece.keys for piece in pieces],
                table=meta.block_table.index_select(0, rows),
                causal=causal,
                tokens=send(tokens),
            )
        )
    return calls


def _cut(meta: AttnMeta, spans: Sequence[Span]) -> tuple[list[_Piece], list[_Piece]]:
    """What lies between spans, and what lies in them, of all rows."""
    between: list[_Piece] = []
    whole: list[_Piece] = []
    for row in range(meta.n):
        token, end = meta.cu_q[row], meta.kv_lens[row]
        begin = at = end - (meta.cu_q[row + 1] - token)  # the first query's position
        for _, low, high in sorted(span for span in spans if span[0] == row):
            low, high = max(low, at), min(high, end)
            if low >= high:
                continue
            if low > at:
                between.append(_Piece(row, token + at - begin, low - at, low))
            whole.append(_Piece(row, token + low - begin, high - low, high))
            at = high
        if at < end:
            between.append(_Piece(row, token + at - begin, end - at, end))
    return between, whole
