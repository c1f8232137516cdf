"""Keys and values in blocks, and batches of queries over them: what attention of every device is tried on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.steps.attention_meta import AttnMeta, Heads, KVSpec

BLOCKS = 200


@dataclass(frozen=True)
class Row:
    """A row of a batch: `count` queries, the last of which is key number `length`."""

    sequence: int
    length: int
    count: int


class Cache:
    """Keys and values of some sequences, the same for every ops table."""

    def __init__(self, ops: BaseOps, heads: Heads, lengths: Sequence[int], seed: int = 0) -> None:
        self.ops, self.heads = ops, heads
        numbers = torch.Generator().manual_seed(seed)
        spec = KVSpec(heads.num_kv, heads.size, heads.size, ops.dtype)
        self.kv = ops.alloc_kv(spec, BLOCKS)
        order = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS))
        self.tables, self.queries = [], []
        for length in lengths:
            count = -(-length // ops.block_size)
            blocks, order = order[:count], order[count:]
            self.tables.append(blocks.astype(np.int32))
            draw = (torch.randn(count * ops.block_size, n, heads.size, generator=numbers)
                    for n in (heads.num_kv, heads.num_kv, heads.num_q))  # fmt: skip
            k, v, q = (x.to(ops.dtype) for x in draw)
            self.queries.append(q)
            for i, block in enumerate(blocks.tolist()):
                part = slice(i * ops.block_size, (i + 1) * ops.block_size)
                ops.import_block(self.kv, block, k[part], v[part])

    def batch(
        self,
        rows: Sequence[Row],
        extra_width: int = 0,
        spans: Sequence[tuple[int, int, int]] = (),
    ) -> tuple[Tensor, AttnMeta]:
        """Queries [T, heads, D] of rows, those of one query first, and their description. Spans (row, start, end) see
        each other whole."""
        width = max(-(-row.length // self.ops.block_size) for row in rows) + extra_width
        table = np.zeros((len(rows), width), np.int32)
        q, slots = [], []
        for i, row in enumerate(rows):
            blocks = self.tables[row.sequence]
            table[i, : min(width, len(blocks))] = blocks[:width]
            places = np.arange(row.length - row.count, row.length)
            slots.append(blocks[places // self.ops.block_size] * self.ops.block_size
                         + places % self.ops.block_size)  # fmt: skip
            q.append(self.queries[row.sequence][places])
        meta = self.ops.make_meta(
            [row.count for row in rows],
            [row.length for row in rows],
            torch.from_numpy(table),
            torch.from_numpy(np.concatenate(slots).astype(np.int64)),
            list(spans),
        )
        return torch.cat(q), meta

    def attend(
        self,
        rows: Sequence[Row],
        extra_width: int = 0,
        spans: Sequence[tuple[int, int, int]] = (),
        **options: object,
    ) -> list[Tensor]:
        """Each row's output [count, heads, D]."""
        q, meta = self.batch(rows, extra_width, spans)
        v = q[:, : self.heads.num_kv]
        out = self.ops.paged_attention(q, v, v, self.kv, meta, scale=0.3, **options)  # type: ignore[arg-type]
        return list(out.split([row.count for row in rows]))


ROWS = [Row(0, 1, 1), Row(1, 40, 1), Row(2, 700, 1), Row(3, 300, 300), Row(4, 50, 17), Row(5, 5, 5)]
LENGTHS = [1, 40, 700, 300, 50, 5]
