"""Ops for Ascend 310P: float16 alone, weights and caches as its matrix unit reads them (FRACTAL_NZ), attention by
NNAL's operators."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps, Use
from services.decoder.devices.npu.fused_attention import Form, Heads, Trial, padded_size
from services.decoder.devices.npu.ops import NpuKV, NpuOps
from services.decoder.devices.npu.telling_batch import TellingBatch
from services.decoder.steps.attention_meta import AttnMeta, KVSpec, Packed, PagedKV
from shared.errors import InvalidRequest

_NZ = 29  # the number of the format FRACTAL_NZ
_TILE = 16  # elements
_LARGEST_BLOCK = 16384  # elements of one head in a block
_LEAST_NORM_BYTES = 32  # of a row
_GATE_ROUNDING = 32  # elements: rows of others the operator for gates does not take
_MASK = 2048


@dataclass(frozen=True)
class TiledKV(NpuKV):
    """Keys and values [blocks, num_kv * P / 16, block_size, 16]."""

    num_kv: int


class Npu310POps(NpuOps):
    """No windows, sinks and spans, and no blocks that are swapped out."""

    name = "npu-310p"
    without_form: ClassVar[str] = "not served on an Ascend 310P: models with this are refused"

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int = 128) -> None:
        super().__init__(device, dtype, block_size)
        hidden = torch.full((_MASK, _MASK), float("-inf"), dtype=torch.float16).triu(1)
        self._hidden = torch_npu.npu_format_cast(hidden.to(device), _NZ)

    # Linear layers and small ops

    def _pack_dense(self, weight: Tensor, bias: Tensor | None, use: Use) -> Packed:
        """In tiles, where the sizes are multiples of theirs."""
        packed = super()._pack_dense(weight, bias, use)
        if not all(size > _TILE and size % _TILE == 0 for size in packed.weight.shape):
            return packed
        return Packed(torch_npu.npu_format_cast(packed.weight, _NZ), packed.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, H]; short rows by the reference."""
        if x.shape[-1] * x.itemsize < _LEAST_NORM_BYTES:
            return BaseOps.rms_norm(self, x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The same."""
        if x.shape[-1] * x.itemsize < _LEAST_NORM_BYTES:
            return BaseOps.add_rms_norm(self, x, residual, weight, eps)
        return super().add_rms_norm(x, residual, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * I]; widths that the operator does not take by the reference."""
        if gate_up.shape[-1] % _GATE_ROUNDING:
            return BaseOps.swiglu(self, gate_up)
        return super().swiglu(gate_up)

    # The cache

    def _zeros(self, spec: KVSpec, num_blocks: int, device: torch.device) -> PagedKV:
        width = padded_size(max(spec.k_size, spec.v_size))
        if width * self.block_size > _LARGEST_BLOCK:
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"heads of {width} elements are more than attention on an Ascend 310P takes"
                f" ({_LARGEST_BLOCK // self.block_size})",
                field="model",
            )
        shape = (num_blocks, spec.num_kv_heads * width // _TILE, self.block_size, _TILE)
        k, v = (
            torch_npu.empty_with_format(shape, dtype=spec.dtype, device=device, acl_format=_NZ)
            for _ in range(2)
        )
        return TiledKV(k.zero_(), v.zero_(), spec.k_size, spec.v_size, spec.num_kv_heads)

    def alloc_host_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """Raises InvalidRequest for any block: nothing says that copies to the host keep the layout."""
        if num_blocks:
            raise InvalidRequest(
                "UNSUPPORTED_OPTION",
                f"--num-host-blocks {num_blocks}: on an Ascend 310P no blocks are swapped out; leave the flag away",
                field="num_host_blocks",
            )
        nothing = torch.zeros((0, spec.num_kv_heads, self.block_size, _TILE), dtype=spec.dtype)
        return TiledKV(nothing, nothing, spec.k_size, spec.v_size, spec.num_kv_heads)

    def cached_heads(self, kv: PagedKV) -> tuple[int, int]:
        """Heads of keys in a cache, and elements of each."""
        num_kv = _tiled(kv).num_kv
        return num_kv, kv.k.shape[1] * _TILE // num_kv

    def write(self, k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> None:
        """The operator sees by the format how the cache lies."""
        torch_npu._npu_reshape_and_cache(k, v, kv.k, kv.v, slots)

    def export_block(self, kv: PagedKV, block: int) -> tuple[Tensor, Tensor]:
        """One block in the canonical layout (token of the block, kv head, element)."""
        own = _tiled(kv)
        k, v = (
            x[block].permute(1, 0, 2).reshape(self.block_size, own.num_kv, -1) for x in (kv.k, kv.v)
        )
        return k[..., : own.k_size].clone(), v[..., : own.v_size].clone()

    def import_block(self, kv: PagedKV, block: int, k: Tensor, v: Tensor) -> None:
        """Writes one block given in the canonical layout."""
        _, width = self.cached_heads(kv)
        for cache, new in ((kv.k, k), (kv.v, v)):
            rows = torch.nn.functional.pad(new, (0, width - new.shape[-1]))
            tiles = rows.reshape(self.block_size, -1, _TILE).permute(1, 0, 2)
            cache[block] = tiles.contiguous().to(cache.device)

    def gather(self, kv: PagedKV, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values [length, num_kv, D] of one row of the block table."""
        own = _tiled(kv)
        blocks = table[: -(-length // self.block_size)].long()
        k, v = (
            x.index_select(0, blocks).permute(0, 2, 1, 3).reshape(-1, own.num_kv, width)[:length]
            for x, (_, width) in ((x, self.cached_heads(kv)) for x in (kv.k, kv.v))
        )
        return k[..., : own.k_size], v[..., : own.v_size]

    # Attention

    def make_meta(
        self,
        counts: Sequence[int],
        kv_lens: Sequence[int],
        block_table: Tensor,
        slots: Tensor,
        bidirectional: list[tuple[int, int, int]] | None = None,
    ) -> AttnMeta:
        """Adds lengths as the operators want them: one on the host, the other on the device."""
        slots = slots.to(torch.int32)
        meta = BaseOps.make_meta(self, counts, kv_lens, block_table, slots, bidirectional)
        if meta.max_q > 1:
            meta.device_state["counts"] = torch.tensor(counts, dtype=torch.int32)
            meta.device_state["lengths"] = torch.tensor(kv_lens, dtype=torch.int32)
        else:
            meta.device_state["lengths"] = self._send(np.asarray(kv_lens, np.int64)).int()
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
        """Causal attention. Raises InvalidRequest for anything else."""
        asked: dict[str, object] = {
            "a window": window,
            "chunks": chunk,
            "a soft cap": softcap,
            "sinks": sinks,
            "spans that see each other whole": meta.bidirectional or None,
        }
        if refused := [name for name, value in asked.items() if value is not None]:
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"attention with {' and '.join(refused)} is not served on an Ascend 310P: use a 910B",
                field="model",
            )
        num_kv, width = self.cached_heads(kv)
        tokens, num_q = meta.cu_q[-1], q.shape[1]
        wide = self.widened(q[:tokens], width)
        out = torch.zeros((q.shape[0], num_q, width), dtype=q.dtype, device=q.device)
        state, rows = meta.device_state, out[:tokens]
        if meta.max_q == 1:
            torch_npu._npu_paged_attention(
                wide, kv.k, kv.v, num_kv, num_q, scale, meta.block_table, state["lengths"], rows
            )
        else:
            torch_npu._npu_paged_attention_splitfuse(
                wide,
                kv.k,
                kv.v,
                meta.block_table,
                state["lengths"],
                self._hidden,
                state["counts"],
                num_kv,
                num_q,
                scale,
                rows,
            )
        return out[..., : v.shape[-1]]

    def attention_trials(self, heads: Heads) -> Iterator[Trial]:
        """The one form that there is, for heads that it takes."""
        if heads.window or heads.sinks or heads.size * self.block_size > _LARGEST_BLOCK:
            return
        sizes = (heads.num_q, heads.num_kv, heads.size)
        batch = TellingBatch.draw(self.dtype, self.block_size, sizes)
        spec = KVSpec(heads.num_kv, heads.size, heads.size, self.dtype)
        kv = self.alloc_kv(spec, len(batch.kv.k))
        for block in range(len(batch.kv.k)):
            self.import_block(kv, block, batch.kv.k[block], batch.kv.v[block])
        counts = [
            end - start for start, end in zip([0, *batch.call.ends], batch.call.ends, strict=False)
        ]
        table, q = batch.call.table.to(self.device), batch.q.to(self.device)
        slots = torch.zeros(len(q), dtype=torch.int32, device=self.device)
        meta = self.make_meta(counts, batch.call.kv_lens, table, slots)
        error = batch.error(self.paged_attention(q, q, q, kv, meta, scale=batch.scale))
        yield Trial(Form("NZ"), error, error <= batch.tolerance)


def _tiled(kv: PagedKV) -> TiledKV:
    assert isinstance(kv, TiledKV)
    return kv
