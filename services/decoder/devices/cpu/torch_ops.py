"""Ops for CPUs by torch alone, where the kernels of `ops.py` cannot be had. In float32 every row is
bit-equal whatever else is in the batch.

What makes that so (each point is tested): torch's float32 GEMM gives equal rows when the number of
rows is a multiple of 4 or at least 12, so smaller batches are padded; attention pads queries the
same way and keys to multiples of 64 with mask, sums values in tiles of 128 keys, one tile after the
other, so that a sum's order depends on the key alone; activations use only operations whose vector
and scalar forms agree in every bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.row_groups import RowGroup, group_rows
from services.decoder.steps.attention_meta import (
    AttnMeta,
    HeadNorms,
    Heads,
    KVSpec,
    Packed,
    PagedKV,
)
from shared.cpu_kernels.host_memory import zeros_in_huge_pages

# Keys of one partial sum over values: GEMM cuts longer sums (from 193 on, measured) by their length.
_VALUE_TILE = 128


class TorchCpuOps(BaseOps):
    """Keys and values lie as [num_kv, blocks, block_size * D]: a gather copies whole blocks and
    leaves a batch of matrices behind, one for each pair of head and row. What `paged_attention`
    returns is overwritten by the next layer."""

    name = "cpu"
    block_axis = 1

    @property
    def row_invariant(self) -> bool:
        """True in float32. Library kernels for bfloat16 promise nothing."""
        return self.dtype == torch.float32

    def padded_rows(self, rows: int) -> int:
        """Up to a multiple of 4 below 12 rows, so that each linear layer need not pad by itself."""
        return rows if rows >= 12 or not self.row_invariant else -(-rows // 4) * 4

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """[rows, in] to [rows, out], padded where the number of rows would change their bits."""
        rows = x.shape[0]
        padded = self.padded_rows(rows)
        if padded == rows:
            return super().linear(x, packed)
        wide = x.new_zeros((padded, x.shape[1]))
        wide[:rows] = x
        return super().linear(wide, packed)[:rows]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, H]; in float32 without the conversions of the reference."""
        if x.dtype != torch.float32:
            return super().rms_norm(x, weight, eps)
        return (x * x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()).mul_(weight)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Overwrites `residual` with the sum."""
        residual += x
        return self.rms_norm(residual, weight, eps), residual

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Separate products and one sum: fused forms round differently at a vector's tail."""
        turned = torch.roll(x, x.shape[-1] // 2, -1).mul_(sin)
        return turned.add_(x * cos)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu spelt out in float32: torch's own differs by a bit at a vector's tail."""
        if not self.row_invariant:
            return super().swiglu(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return (gate / gate.neg().exp_().add_(1)).mul_(up)

    def linear_gelu(self, x: Tensor, packed: Packed) -> Tensor:
        """GELU by its form with exp, for the same reason as in `swiglu`."""
        if not self.row_invariant:
            return super().linear_gelu(x, packed)
        x = self.linear(x, packed)
        inner = (x * x * x).mul_(0.044715).add_(x).mul_(-math.sqrt(8 / math.pi))
        return x / inner.exp_().add_(1)

    def alloc_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """Memory of its own (see `zeros_in_huge_pages`), keys and values as halves of one tensor."""
        return self._alloc(spec, num_blocks, touch=True)

    def alloc_host_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """The same; it takes memory when it is first used."""
        return self._alloc(spec, num_blocks, touch=False)

    def _alloc(self, spec: KVSpec, num_blocks: int, touch: bool) -> PagedKV:
        shape = (2 * spec.num_kv_heads, num_blocks, self.block_size * spec.size)
        both = zeros_in_huge_pages(shape, spec.dtype, touch)
        return _JointKV(both[: spec.num_kv_heads], both[spec.num_kv_heads :], both)

    def qkv_rope_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: Heads,
        kv: PagedKV,
        meta: AttnMeta,
        norms: HeadNorms | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotates in place and writes keys and values as they lie beside each other."""
        rows = qkv.view(qkv.shape[0], -1, heads.size)
        turning = rows[:, : heads.num_q + heads.num_kv]
        if norms is not None:
            turning.copy_(self.head_norms(turning, heads, norms))
        turned = torch.roll(turning, heads.size // 2, -1).mul_(sin)
        turning.mul_(cos).add_(turned)
        both = _joint(kv).both
        tokens = both.view(both.shape[0], -1, heads.size)
        tokens.index_copy_(1, meta.slots, rows[:, heads.num_q :].transpose(0, 1))
        return rows[:, : heads.num_q], turning[:, heads.num_q :], rows[:, -heads.num_kv :]

    def kv_write(self, k: Tensor, v: Tensor, kv: PagedKV, meta: AttnMeta) -> None:
        """Writes this step's keys and values [T, num_kv, D] where `meta.slots` says."""
        for cache, new in ((kv.k, k), (kv.v, v)):
            tokens = cache.view(cache.shape[0], -1, new.shape[-1])
            tokens.index_copy_(1, meta.slots, new.transpose(0, 1))

    def scrub(self, kv: PagedKV, slots: Tensor) -> None:
        """Zeroes single tokens of the cache."""
        both = _joint(kv).both
        both.view(both.shape[0], -1, both.shape[2] // self.block_size).index_fill_(1, slots, 0)

    def export_block(self, kv: PagedKV, block: int) -> tuple[Tensor, Tensor]:
        """One block in the canonical layout (token of the block, kv head, element)."""
        k, v = (
            x[:, block].view(x.shape[0], self.block_size, -1).transpose(0, 1).clone()
            for x in (kv.k, kv.v)
        )
        return k, v

    def import_block(self, kv: PagedKV, block: int, k: Tensor, v: Tensor) -> None:
        """Writes one block given in the canonical layout."""
        kv.k[:, block] = k.transpose(0, 1).flatten(1)
        kv.v[:, block] = v.transpose(0, 1).flatten(1)

    def gather(self, kv: PagedKV, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values [length, num_kv, D] of one row of the block table."""
        blocks = table[: -(-length // self.block_size)].long()
        k, v = (
            x.index_select(1, blocks).view(x.shape[0], -1, x.shape[2] // self.block_size)
            for x in (kv.k, kv.v)
        )
        return k.transpose(0, 1)[:length], v.transpose(0, 1)[:length]

    def make_meta(
        self,
        counts: Sequence[int],
        kv_lens: Sequence[int],
        block_table: Tensor,
        slots: Tensor,
        bidirectional: list[tuple[int, int, int]] | None = None,
    ) -> AttnMeta:
        """Adds the groups of rows of like size that attention runs as one batch each."""
        meta = super().make_meta(counts, kv_lens, block_table, slots, bidirectional)
        meta.device_state["groups"] = group_rows(
            counts, kv_lens, block_table.numpy(), self.block_size
        )
        return meta

    def paged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: PagedKV,
        meta: AttnMeta,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As the reference says; chunks, soft caps, sinks and two-way spans are left to it."""
        if chunk or softcap is not None or sinks is not None or meta.bidirectional:
            return super().paged_attention(
                q,
                k,
                v,
                kv,
                meta,
                scale=scale,
                window=window,
                chunk=chunk,
                softcap=softcap,
                sinks=sinks,
            )
        out = meta.device_state.get("out")
        if out is None or out.shape != q.shape:
            out = meta.device_state["out"] = q.new_zeros(q.shape)
        for group in meta.device_state["groups"]:
            self._attend(group, q, out, _joint(kv).both, scale, window)
        return out

    def _attend(
        self, group: RowGroup, q: Tensor, out: Tensor, kv: Tensor, scale: float, window: int | None
    ) -> None:
        """Fills the group's rows of `out` [T, num_q, D]."""
        num_kv, size, g = kv.shape[0] // 2, q.shape[2], group.rows
        share = q.shape[1] // num_kv  # query heads for each head of keys
        real = group.queries * share
        padded = self.padded_rows(real)
        by_row = (g, group.queries, num_kv, share, size)
        by_head = (num_kv, g, group.queries, share, size)

        queries = group.query_memory(num_kv, padded, q)
        picked = q[group.tokens].view(by_row).permute(2, 0, 1, 3, 4)
        torch.mul(picked, scale, out=queries[:, :, :real].view(by_head))
        gathered = kv.index_select(1, group.blocks).view(2, num_kv * g, group.keys, size)
        keys, values = gathered[0], gathered[1]
        scores = torch.bmm(queries.view(num_kv * g, padded, size), keys.transpose(1, 2))
        # Replaced, not added to: what lies behind the mask may be anything.
        every = scores.view(num_kv, g, padded, group.keys)
        every.masked_fill_(group.hidden(window, share, padded), float("-inf"))
        weights = torch.softmax(scores, -1)
        if group.keys <= _VALUE_TILE:
            mixed = torch.bmm(weights, values)
        else:
            mixed = torch.bmm(weights[:, :, :_VALUE_TILE], values[:, :_VALUE_TILE])
            for start in range(_VALUE_TILE, group.keys, _VALUE_TILE):
                tile = slice(start, start + _VALUE_TILE)
                mixed += torch.bmm(weights[:, :, tile], values[:, tile])
        found = mixed.view(num_kv, g, padded, size)[:, :, :real].view(by_head)
        if isinstance(group.tokens, slice):
            out[group.tokens].view(by_row).permute(2, 0, 1, 3, 4).copy_(found)
            return
        rows = found.permute(1, 2, 0, 3, 4).reshape(-1, q.shape[1], size)
        if group.kept is not None:
            rows = rows.index_select(0, group.kept)
        out[group.tokens if group.targets is None else group.targets] = rows


@dataclass(frozen=True)
class _JointKV(PagedKV):
    """Keys and values [num_kv, blocks, block_size * D] as the halves of `both`."""

    both: Tensor


def _joint(kv: PagedKV) -> _JointKV:
    assert isinstance(kv, _JointKV)
    return kv
