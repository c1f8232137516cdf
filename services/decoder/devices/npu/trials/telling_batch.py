"""A batch on which attention that is wrong in some place gives a result that is wrong all over: for trying kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.npu.attention_call import AttentionCall
from services.decoder.steps.attention_meta import AttnMeta, KVSpec, PagedKV

# Queries and keys of each row, around the edges of blocks and of what kernels take at once.
_DECODES = ((1, 1), (1, 127), (1, 128), (1, 129), (1, 700))
_CHUNKS = ((129, 129), (60, 700))
_WINDOW = 100
_LARGE, _WIDER = 300.0, 4.0
_SCORE = 6.0  # of a key that decides a softmax
_TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float32: 1e-3}


@dataclass(frozen=True)
class TellingBatch:
    """Rows in which the last key of each query, and with a window the first that it sees and the one before that, weigh
    more than all others. The reference is computed on the host."""

    q: Tensor  # [T, num_q, size]
    kv: PagedKV  # [blocks, block_size, num_kv, size]
    meta: AttnMeta
    call: AttentionCall
    scale: float
    window: int | None = None
    sinks: Tensor | None = None
    host: "TellingBatch | None" = None  # the same on the host

    @classmethod
    def draw(
        cls,
        dtype: torch.dtype,
        block_size: int,
        heads: tuple[int, int, int],
        *,
        chunks: bool = True,
        rows: Sequence[tuple[int, int]] = (),
    ) -> "TellingBatch":
        """heads: of queries, of keys, and the size of each; chunks: rows of many tokens too; rows: queries and keys of
        each, in the place of those."""
        num_q, num_kv, size = heads
        rows = rows or [*_DECODES, *(_CHUNKS if chunks else ())]
        ops = BaseOps(torch.device("cpu"), dtype, block_size)
        generator = torch.Generator().manual_seed(0)
        scale = size**-0.5
        queries = sum(count for count, _ in rows)
        q = torch.randn(queries, num_q, size, generator=generator)
        widths = [-(-keys // block_size) for _, keys in rows]
        shape = (sum(widths) + 1, block_size, num_kv, size)
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        table = torch.zeros((len(rows), max(widths)), dtype=torch.int32)
        block, token = shape[0], 0
        for row, (count, keys) in enumerate(rows):
            block -= widths[row]
            table[row, : widths[row]] = torch.arange(block, block + widths[row])
            own = k[block : block + widths[row]].view(-1, num_kv, size)
            _plant(own, q[token : token + count], keys, scale)
            token += count
        kv = ops.alloc_kv(KVSpec(num_kv, size, size, dtype), shape[0])
        kv.k.copy_(k.to(dtype))
        kv.v.copy_(v.to(dtype))
        meta = ops.make_meta(
            [count for count, _ in rows],
            [keys for _, keys in rows],
            table,
            torch.zeros(queries, dtype=torch.int64),
        )
        call = AttentionCall(meta.cu_q[1:], meta.kv_lens, meta.block_table)
        return cls(q.to(dtype), kv, meta, call, scale)

    def on(self, device: torch.device) -> "TellingBatch":
        """The same on a device."""
        return replace(
            self,
            q=self.q.to(device),
            kv=PagedKV(self.kv.k.to(device), self.kv.v.to(device)),
            call=replace(self.call, table=self.call.table.to(device)),
            sinks=None if self.sinks is None else self.sinks.to(device),
            host=self,
        )

    def with_window(self) -> "TellingBatch":
        """The same, of which each query sees a part."""
        return replace(self, window=_WINDOW)

    def with_sinks(self) -> "TellingBatch":
        """The same, with a logit of each head of queries that has no value."""
        generator = torch.Generator().manual_seed(1)
        sinks = 2 + torch.randn(self.q.shape[1], generator=generator)
        return replace(self, sinks=sinks.to(self.q))

    def with_large_elements(self, elements: Sequence[int]) -> "TellingBatch":
        """The same, some elements of all keys a hundred times larger than others, as with the biases of some models,
        and with other values for each key, which no kernel may lose."""
        k = self.kv.k.clone()
        for place, element in enumerate(elements):
            k[..., element] *= _WIDER
            k[..., element] += _LARGE if place % 2 else -_LARGE
        return replace(self, kv=PagedKV(k, self.kv.v))

    def with_numbers(self, k: Tensor, v: Tensor) -> "TellingBatch":
        """The same with other keys and values, on the host."""
        return replace(self, kv=PagedKV(k, v))

    @property
    def tolerance(self) -> float:
        """The largest `error` of a kernel that is right."""
        return _TOLERANCES[self.q.dtype]

    def expected(self) -> Tensor:
        """Of the reference, on the host."""
        own = self.host or self
        ops = BaseOps(own.q.device, own.q.dtype, own.kv.k.shape[1])
        return ops.paged_attention(
            own.q,
            own.q,
            own.kv.v,
            own.kv,
            own.meta,
            scale=own.scale,
            window=own.window,
            sinks=own.sinks,
        )

    def error(self, found: Tensor) -> float:
        """The largest difference from the reference; infinity if there is something that is not finite."""
        difference = (found.cpu().float() - self.expected().float()).abs().max()
        return float(torch.nan_to_num(difference, nan=float("inf")))


def _plant(k: Tensor, q: Tensor, keys: int, scale: float) -> None:
    """Makes the last key of a row, and those at both sides of a window's edge, ones that its last query looks for."""
    num_kv, size = k.shape[1:]
    share = q.shape[1] // num_kv
    wanted = q[-1].view(num_kv, share, size).mean(1)
    wanted = wanted * (_SCORE * share / (scale * size))
    edge = keys - _WINDOW
    for place in (keys - 1, edge, edge - 1):
        if 0 <= place < keys:
            k[place] = wanted
