"""Ops for Ascend 310P: float16 alone, weights and caches as its matrix unit reads them (FRACTAL_NZ), attention by
NNAL's operators."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.use import Use
from services.decoder.devices.npu.attention import tiled_attention
from services.decoder.devices.npu.attention.cache import NpuKV, widened
from services.decoder.devices.npu.attention.fused_attention import padded_size
from services.decoder.devices.npu.attention.tiled_attention import NZ, TILE, divided
from services.decoder.devices.npu.forms import Form, Heads
from services.decoder.devices.npu.ops import NpuOps
from services.decoder.devices.npu.trials.telling_batch import TellingBatch
from services.decoder.devices.npu.weights import tiled_weights
from services.decoder.steps.attention_meta import AttnMeta, KVSpec, PagedKV
from shared.errors import InvalidRequest

_LARGEST_BLOCK = 16384  # elements of one head in a block
_LEAST_NORM_BYTES = 32  # of a row
_ROTATIONS = (64, 128)  # elements of a head that the operator turns
_GATE_ROUNDING = 32  # elements: rows of others the operator for gates does not take


@dataclass(frozen=True)
class TiledKV(NpuKV):
    """Keys and values [blocks, num_kv * P / 16, block_size, 16]; for large heads blocks are halves of the plan's."""

    num_kv: int


class Npu310POps(NpuOps):
    """No sinks, chunks and soft caps, and no blocks that are swapped out."""

    name = "npu-310p"
    is_310p: ClassVar[bool] = True
    without_form: ClassVar[str] = "not served on an Ascend 310P: models with this are refused"

    # Linear layers and small ops

    def _is_tiled(self, weight: Tensor, use: Use) -> bool:
        """Where the sizes are multiples of those of tiles."""
        return tiled_weights.fits(weight)

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

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """By the operator that turns queries and keys at once, here all heads but the last, and the last. That of the
        other chips is documented for this one with compilation at every new shape alone."""
        if x.shape[-1] not in _ROTATIONS or x.shape[1] == 1:
            return self.rope_by_torch(x, cos, sin)
        rows = [part.contiguous()[None] for part in (x[:, :-1], x[:, -1:])]
        turned = torch_npu.npu_apply_rotary_pos_emb(rows[0], rows[1], cos[None], sin[None])
        return torch.cat([part[0] for part in turned], 1)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * I]; widths that the operator does not take by the reference."""
        if gate_up.shape[-1] % _GATE_ROUNDING:
            return BaseOps.swiglu(self, gate_up)
        return super().swiglu(gate_up)

    # The cache

    def _zeros(self, spec: KVSpec, num_blocks: int, device: torch.device) -> PagedKV:
        width = padded_size(max(spec.k_size, spec.v_size))
        size = self._part(width)
        parts = num_blocks * self.block_size // size
        shape = (parts, spec.num_kv_heads * width // TILE, size, TILE)
        k, v = (
            torch_npu.empty_with_format(shape, dtype=spec.dtype, device=device, acl_format=NZ)
            for _ in range(2)
        )
        return TiledKV(k.zero_(), v.zero_(), spec.k_size, spec.v_size, spec.num_kv_heads)

    def _part(self, width: int) -> int:
        """Tokens of a block in the cache, where heads have `width` elements: a block of larger ones is divided, as with
        vllm-ascend. Raises InvalidRequest for those of which no part is small enough."""
        for size in (self.block_size, self.block_size // 2):
            if width * size <= _LARGEST_BLOCK:
                return size
        raise InvalidRequest(
            "UNSUPPORTED_MODEL",
            f"heads of {width} elements are more than attention on an Ascend 310P takes"
            f" ({2 * _LARGEST_BLOCK // self.block_size})",
            field="model",
        )

    def alloc_host_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """Raises InvalidRequest for any block: nothing says that copies to the host keep the layout."""
        if num_blocks:
            raise InvalidRequest(
                "UNSUPPORTED_OPTION",
                f"--num-host-blocks {num_blocks}: on an Ascend 310P no blocks are swapped out; leave the flag away",
                field="num_host_blocks",
            )
        size = self._part(padded_size(max(spec.k_size, spec.v_size)))
        nothing = torch.zeros((0, spec.num_kv_heads, size, TILE), dtype=spec.dtype)
        return TiledKV(nothing, nothing, spec.k_size, spec.v_size, spec.num_kv_heads)

    def cached_heads(self, kv: PagedKV) -> tuple[int, int]:
        """Heads of keys in a cache, and elements of each."""
        num_kv = _tiled(kv).num_kv
        return num_kv, kv.k.shape[1] * TILE // num_kv

    def write_forms(self) -> Iterator[str]:
        """The operator sees by the format how the cache lies."""
        yield "reshape_and_cache"
        yield "index_put"

    def put(self, k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> None:
        """Tile by tile."""
        size = kv.k.shape[2]
        blocks, places = slots // size, slots % size
        for cache, rows in ((kv.k, k), (kv.v, v)):
            tiles = torch.arange(cache.shape[1], device=cache.device)
            cache.index_put_(
                (blocks[:, None], tiles[None], places[:, None]), rows.view(len(rows), -1, TILE)
            )

    def capacity(self, kv: PagedKV) -> int:
        """Tokens that a cache holds."""
        return kv.k.shape[0] * kv.k.shape[2]

    def parts(self, kv: PagedKV) -> int:
        """Into how many a block is divided in a cache."""
        return self.block_size // kv.k.shape[2]

    def swap_blocks(self, source: PagedKV, target: PagedKV, src: Tensor, dst: Tensor) -> None:
        """All parts of each; on the device alone."""
        parts = self.parts(source)
        super().swap_blocks(source, target, divided(src, parts), divided(dst, parts))

    def export_block(self, kv: PagedKV, block: int) -> tuple[Tensor, Tensor]:
        """One block in the canonical layout (token of the block, kv head, element)."""
        own, parts = _tiled(kv), self.parts(kv)
        k, v = (
            x[block * parts : (block + 1) * parts]
            .permute(0, 2, 1, 3)
            .reshape(self.block_size, own.num_kv, -1)
            for x in (kv.k, kv.v)
        )
        return k[..., : own.k_size].clone(), v[..., : own.v_size].clone()

    def import_block(self, kv: PagedKV, block: int, k: Tensor, v: Tensor) -> None:
        """Writes one block given in the canonical layout."""
        _, width = self.cached_heads(kv)
        parts = self.parts(kv)
        for cache, new in ((kv.k, k), (kv.v, v)):
            rows = torch.nn.functional.pad(new, (0, width - new.shape[-1]))
            tiles = rows.reshape(parts, cache.shape[2], -1, TILE).permute(0, 2, 1, 3)
            cache[block * parts : (block + 1) * parts] = tiles.contiguous().to(cache.device)

    def gather(self, kv: PagedKV, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values [length, num_kv, D] of one row of the block table."""
        own = _tiled(kv)
        blocks = divided(table[: -(-length // self.block_size)].long(), self.parts(kv))
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
        """Adds the call that attention takes."""
        slots = slots.to(torch.int32)
        meta = BaseOps.make_meta(self, counts, kv_lens, block_table, slots, bidirectional)
        meta.device_state["call"] = tiled_attention.tiled_call(meta, self.send)
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
        """With windows and spans that see each other whole, by masks. Raises InvalidRequest for anything else."""
        asked: dict[str, object] = {"chunks": chunk, "a soft cap": softcap, "sinks": sinks}
        if refused := [name for name, value in asked.items() if value is not None]:
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"attention with {' and '.join(refused)} is not served on an Ascend 310P: use a 910B",
                field="model",
            )
        num_kv, width = self.cached_heads(kv)
        form = self.forms.form(Heads(q.shape[1], num_kv, width, window is not None))
        if form is None:
            return BaseOps.paged_attention(self, q, k, v, kv, meta, scale=scale, window=window)
        return self._attend(q, kv, meta, form, scale, window)[..., : v.shape[-1]]

    def _attend(
        self,
        q: Tensor,
        kv: PagedKV,
        meta: AttnMeta,
        form: Form,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """[T, num_q, P]; padding rows give zeros."""
        num_kv, width = self.cached_heads(kv)
        tokens, num_q = meta.cu_q[-1], q.shape[1]
        wide, call = widened(q[:tokens], width), meta.device_state["call"]
        heads = (num_q, num_kv, self.parts(kv))
        found = tiled_attention.attend(wide, kv, call, form, heads, scale, window)
        if tokens == q.shape[0]:
            return found
        out = found.new_zeros((q.shape[0], num_q, width))
        out[:tokens] = found
        return out

    def attention_forms(self, heads: Heads) -> Sequence[Form]:
        """Every form that there is, for heads that the operators take."""
        if heads.sinks or heads.size * self.block_size > 2 * _LARGEST_BLOCK:
            return ()
        return tiled_attention.FORMS

    def attention_error(self, heads: Heads, form: Form) -> tuple[float, float]:
        """On steps of one token a row, which have an operator of their own, and on others."""
        sizes = (heads.num_q, heads.num_kv, heads.size)
        batches = [
            TellingBatch.draw(self.dtype, self.block_size, sizes, chunks=chunks)
            for chunks in (False, True)
        ]
        if heads.window:
            batches = [batch.with_window() for batch in batches]
        return max(self._error(batch, heads, form) for batch in batches), batches[0].tolerance

    def _error(self, batch: TellingBatch, heads: Heads, form: Form) -> float:
        spec = KVSpec(heads.num_kv, heads.size, heads.size, self.dtype)
        kv = self.alloc_kv(spec, len(batch.kv.k))
        for block in range(len(batch.kv.k)):
            self.import_block(kv, block, batch.kv.k[block], batch.kv.v[block])
        counts = [end - start for start, end in pairwise([0, *batch.call.ends])]
        table, q = batch.call.table.to(self.device), batch.q.to(self.device)
        slots = torch.zeros(len(q), dtype=torch.int32, device=self.device)
        meta = self.make_meta(counts, batch.call.kv_lens, table, slots)
        return batch.error(self._attend(q, kv, meta, form, batch.scale, batch.window))


def _tiled(kv: PagedKV) -> TiledKV:
    assert isinstance(kv, TiledKV)
    return kv
