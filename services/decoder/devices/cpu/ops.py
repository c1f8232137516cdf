"""Ops for CPUs by our own kernels. Every row is bit-equal whatever else is in the batch, in float32
and in bfloat16: each kernel adds up in an order that depends on the row alone.

The cache is [blocks, kv heads, pages, 2, 16 * D]: pages of 16 tokens, keys first, in the order in
which the kernels read them (`shared/cpu_kernels/source/attention/attention.h`), D padded to whole vectors with zeros.
Codes are in pages of bytes (`coded_cache.py`).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import structlog
import torch
from torch import Tensor

from services.decoder.devices.base.adapters import (
    Addition,
    LayerSegments,
    LinearPlace,
    Segment,
)
from services.decoder.devices.base.decoder_layer import DecoderLayer
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.use import Use
from services.decoder.devices.cpu import additions
from services.decoder.devices.cpu.coded_cache import BlockBytes, kept_memory
from services.decoder.devices.cpu.layer import LayerCall, make_call, make_step
from services.decoder.devices.cpu.tasks import find_chunk_tasks, find_tasks
from services.decoder.steps.attention_meta import (
    AttnMeta,
    HeadNorms,
    Heads,
    KVSpec,
    Packed,
    PagedKV,
)
from shared.cpu_kernels import binding, packed_linear, quantized_linear, shortlist
from shared.cpu_kernels.binding import Kernels
from shared.cpu_kernels.host_memory import zeros_in_huge_pages
from shared.cpu_kernels.packed_linear import TYPES, PackedLinear
from shared.cpu_kernels.shortlist import Shortlist
from shared.weights.linear_weight import Codes, LinearWeight
from shared.weights.scheme import HEAD

log = structlog.get_logger(__name__)

_EPILOGUES = {
    Use.LINEAR: binding.PLAIN,
    Use.GATE_UP: binding.SWIGLU,
    Use.GELU: binding.GELU_TANH,
    Use.HEAD: binding.PLAIN,
    Use.UNCHANGED: binding.PLAIN,
}


class CpuOps(BaseOps):
    """The kernels take contiguous rows; what they return is new memory."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype, kernels: Kernels, block_size: int = 16) -> None:
        """block_size: a multiple of the 16 tokens of a page."""
        super().__init__(torch.device("cpu"), dtype, block_size)
        self._kernels = kernels
        self._type = TYPES[dtype]
        self._layers: WeakKeyDictionary[DecoderLayer, LayerCall] = WeakKeyDictionary()
        self._added = additions.AddedInSteps()
        self._addition_memory = additions.Memory(dtype)

    @property
    def row_invariant(self) -> bool:
        """Always."""
        return True

    @property
    def arithmetic(self) -> str:
        """What the bits of the kernels depend on, beside the version of their arithmetic."""
        return self._kernels.arithmetic

    # Linear layers

    def _pack_dense(self, weight: Tensor, bias: Tensor | None, use: Use) -> Packed:
        """In panels of outputs, in huge pages; see `linear.h` of the kernels. Gates lie beside what they gate, so that
        one pass does both, and a GELU is part of the product. Beside a large output matrix lies a sketch of it in
        bytes, for `largest`; see `shortlist.h`."""
        layer = packed_linear.pack(self._kernels, weight, bias, _EPILOGUES[use])
        sketched = use is Use.HEAD and bias is None
        sketch = shortlist.make(self._kernels, weight) if sketched else None
        if sketch is not None:
            log.info("sketch of the output matrix", mb=sketch.num_bytes >> 20)
        return _PackedPanels(layer.panels, layer.bias, layer, sketch)

    def _pack_numbers(self, weight: LinearWeight, use: Use) -> Packed:
        """A few panels at a time; of an output matrix, which has a sketch, all at once."""
        if use is Use.HEAD and weight.bias is None:
            return super()._pack_numbers(weight, use)
        layer = packed_linear.pack_parts(
            self._kernels,
            lambda rows: weight.select(rows, None, self.dtype),
            (weight.out, weight.inputs),
            self.dtype,
            weight.bias,
            _EPILOGUES[use],
        )
        return _PackedPanels(layer.panels, layer.bias, layer)

    def _pack_codes(self, weight: LinearWeight, codes: Codes, use: Use) -> Packed | None:
        """In panels of outputs, too, a few at a time; see `quantized_linear.h`. An output matrix has no
        sketch: it is as small as one."""
        digits = self.scheme.digits if self.scheme and use is not Use.HEAD else HEAD.digits
        layer = quantized_linear.pack_parts(
            self._kernels,
            codes,
            weight.out,
            weight.inputs,
            weight.bias,
            _EPILOGUES[use],
            digits=digits,
        )
        if layer is None:
            return None
        self.coded_layers += 1
        self.coded_weights += weight.out * weight.inputs
        self.coded_bytes += layer.num_bytes
        return _PackedPanels(layer.panels, layer.bias, layer)

    def linear_gelu(self, x: Tensor, packed: Packed) -> Tensor:
        """One pass over a layer from `pack_gelu`."""
        return self.linear(x, packed)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """[rows, in] to [rows, out]."""
        layer = _panels(packed)
        out = torch.empty((x.shape[0], layer.outputs), dtype=self.dtype)
        return packed_linear.linear(self._kernels, x, layer, out)

    def linear_float32(self, x: Tensor, packed: Packed) -> Tensor:
        """The sums as they are, in float32."""
        layer = _panels(packed)
        out = torch.empty((x.shape[0], layer.outputs), dtype=torch.float32)
        return packed_linear.linear(self._kernels, x, layer, out, binding.WIDE)

    def sketched_rows(self, packed: Packed) -> int:
        """As many as a sketch serves, where there is one: it is half as large as the weights, or less."""
        return 0 if _sketch(packed) is None else shortlist.MOST_ROWS

    def largest(self, x: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        """As the reference says, without writing the sums anywhere."""
        pairs = torch.empty((x.shape[0], 2), dtype=torch.int32)
        layer, sketch = _panels(packed), _sketch(packed)
        if sketch is not None and 0 < x.shape[0] <= shortlist.MOST_ROWS:
            shortlist.largest(self._kernels, x, layer, sketch, pairs)
        else:
            packed_linear.linear(self._kernels, x, layer, pairs, binding.LARGEST)
        values, columns = pairs.unbind(1)
        return columns, values.view(torch.float32)

    def pack_addition(self, place: LinearPlace, down: LinearWeight, up: LinearWeight) -> Addition:
        """See `BaseOps.pack_addition`; the outputs in vectors, as the layer has them."""
        place.require(down, up)
        matrices = down.dense(self.dtype), up.dense(self.dtype)
        return additions.pack(place, *matrices, self._kernels.lanes, self._addition_memory)

    def adapted_linear(self, x: Tensor, packed: Packed, segments: Sequence[Segment]) -> Tensor:
        """In one pass, in which the layer's own sums go on with what is added."""
        if not segments:
            return self.linear(x, packed)
        layer, added = _panels(packed), self._added.to_product(segments, len(x))
        out = torch.empty((x.shape[0], layer.outputs), dtype=self.dtype)
        return packed_linear.adapted_linear(
            self._kernels, x, layer, added.segments, added.addresses, out
        )

    def gate_up_swiglu(
        self,
        x: Tensor,
        packed: Packed,
        segments: Sequence[Segment] = (),
    ) -> Tensor:
        """[rows, H] to [rows, I] in one pass over a layer from `pack_gate_up`."""
        return self.adapted_linear(x, packed, segments)

    # Small ops

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., H]; sums in float32."""
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._kernels.rms_norm(
            self._type,
            x.data_ptr(),
            weight.data_ptr(),
            eps,
            x.numel() // size,
            size,
            out.data_ptr(),
        )
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """[rows, H]; sums in float32."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._kernels.add_layer_norm(
            self._type,
            None,
            x.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            eps,
            *x.shape,
            out.data_ptr(),
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Overwrites `residual` with the sum, and `x` with its norm."""
        rows, size = x.shape
        self._kernels.add_rms_norm(
            self._type,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            rows,
            size,
            x.data_ptr(),
        )
        return x, residual

    # The cache

    def block_bytes(self, spec: KVSpec) -> int:
        """With heads padded to whole vectors."""
        pages = spec.num_kv_heads * self.block_size // self._kernels.page
        if spec.coded:
            return pages * self._page_bytes(spec)
        return pages * 2 * self._kernels.page * self._padded(spec) * spec.dtype.itemsize

    def _padded(self, spec: KVSpec) -> int:
        lanes = self._kernels.lanes
        return -(-spec.size // lanes) * lanes

    def _page_bytes(self, spec: KVSpec) -> int:
        kept = max(map(len, spec.kept), default=0)
        return self._kernels.coded_page_bytes(self._type, self._padded(spec), kept)

    def alloc_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """Memory of its own, in huge pages."""
        return self._alloc(spec, num_blocks, touch=True)

    def alloc_host_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """The same; it takes memory when it is first used."""
        return self._alloc(spec, num_blocks, touch=False)

    def _alloc(self, spec: KVSpec, num_blocks: int, touch: bool) -> PagedKV:
        page, heads, size = self._kernels.page, spec.num_kv_heads, self._padded(spec)
        pages = self.block_size // page
        if not spec.coded:
            both = zeros_in_huge_pages(
                (num_blocks, heads, pages, 2, page * size), spec.dtype, touch
            )
            call = binding.Cache(both.data_ptr(), pages, heads, size, spec.size, None, 0, 0)
            return _CpuKV(both[..., 0, :], both[..., 1, :], spec, ctypes.byref(call))
        shape = (num_blocks, heads, pages, self._page_bytes(spec))
        raw, kept = zeros_in_huge_pages(shape, torch.uint8, touch), kept_memory(spec)
        call = binding.Cache(
            raw.data_ptr(), pages, heads, size, spec.size, kept.data_ptr(), kept.shape[1], 1
        )
        # Scales and what is kept beside codes lie behind values.
        codes = page * size
        return _CpuKV(raw[..., :codes], raw[..., codes:], spec, ctypes.byref(call), raw, kept)

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
        """Norms and rotates queries and keys in place and writes the cache."""
        call = binding.RopeWrite(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            meta.slots.data_ptr(),
            None if norms is None else norms.q.data_ptr(),
            None if norms is None else norms.k.data_ptr(),
            qkv.shape[0],
            heads.num_q,
            0.0 if norms is None else norms.eps,
            0,
        )
        self._kernels.rope_write(self._type, call, _own(kv).cache)
        rows = qkv.view(qkv.shape[0], -1, heads.size)
        both = rows[:, heads.num_q :]
        return rows[:, : heads.num_q], both[:, : heads.num_kv], both[:, heads.num_kv :]

    def kv_write(self, k: Tensor, v: Tensor, kv: PagedKV, meta: AttnMeta) -> None:
        """Writes this step's keys and values [T, num_kv, D] where `meta.slots` says."""
        self._copy(self._kernels.kv_write, k.contiguous(), v.contiguous(), kv, meta.slots)

    def scrub(self, kv: PagedKV, slots: Tensor) -> None:
        """Zeroes single tokens of the cache."""
        own = _own(kv)
        zeros = torch.zeros((len(slots), own.spec.num_kv_heads, own.spec.size), dtype=self.dtype)
        self._copy(self._kernels.kv_write, zeros, zeros, kv, slots)

    def export_block(self, kv: PagedKV, block: int) -> tuple[Tensor, Tensor]:
        """One block in the canonical layout (token of the block, kv head, element); codes as bytes, see
        `BlockBytes`."""
        if (own := _own(kv)).raw is not None:
            return self._bytes(own, block).read()
        return self._read(kv, self._slots(block))

    def import_block(self, kv: PagedKV, block: int, k: Tensor, v: Tensor) -> None:
        """Writes one block given in the canonical layout."""
        if (own := _own(kv)).raw is not None:
            self._bytes(own, block).write(k, v)
            return
        self._copy(self._kernels.kv_write, k.contiguous(), v.contiguous(), kv, self._slots(block))

    def gather(self, kv: PagedKV, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values [length, num_kv, D] of one row of the block table."""
        places = torch.arange(length)
        blocks = table[places // self.block_size].long()
        return self._read(kv, blocks * self.block_size + places % self.block_size)

    def _bytes(self, kv: "_CpuKV", block: int) -> BlockBytes:
        assert kv.raw is not None and kv.kept is not None
        size, padded, page = kv.spec.size, self._padded(kv.spec), self._kernels.page
        kept = kv.kept.shape[1]
        return BlockBytes(kv.raw[block], size, padded, kept, page, self.dtype.itemsize)

    def _slots(self, block: int) -> Tensor:
        return torch.arange(block * self.block_size, (block + 1) * self.block_size)

    def _read(self, kv: PagedKV, slots: Tensor) -> tuple[Tensor, Tensor]:
        own = _own(kv)
        shape = (len(slots), own.spec.num_kv_heads, own.spec.size)
        k, v = (torch.empty(shape, dtype=self.dtype) for _ in range(2))
        self._copy(self._kernels.kv_read, k, v, kv, slots)
        return k, v

    def _copy(
        self,
        function: "ctypes._NamedFuncPointer",
        k: Tensor,
        v: Tensor,
        kv: PagedKV,
        slots: Tensor,
    ) -> None:
        slots = slots.contiguous()
        function(
            self._type, k.data_ptr(), v.data_ptr(), slots.data_ptr(), len(slots), _own(kv).cache
        )

    # A layer

    def decoder_layer(
        self,
        normed: Tensor,
        residual: Tensor,
        layer: DecoderLayer,
        cos: Tensor,
        sin: Tensor,
        kv: PagedKV,
        meta: AttnMeta,
        segments: LayerSegments | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same kernels in one call, which overwrites both, where rows need no padding between
        them, and other ranks add nothing."""
        known = self._layers.get(layer)
        if known is None:
            parts = (layer.qkv, layer.output, layer.gate_up, layer.down)
            known = make_call(layer, *map(_panels, parts), alone=self.share.size == 1)
            self._layers[layer] = known
        if not known.whole:
            return super().decoder_layer(normed, residual, layer, cos, sin, kv, meta, segments)
        step = meta.device_state.get("layers")
        if step is None or not step.fits(normed, residual, cos, known.widths):
            tasks = find_tasks(meta, layer.heads.num_q // layer.heads.num_kv)
            step = make_step(normed, residual, layer, known.widths, cos, sin, meta, tasks)
            meta.device_state["layers"] = step
        cache, added = _own(kv).cache, None
        if segments is not None:
            added = self._added.to_layer(segments, len(normed))
        rows, adapters = (None, None) if added is None else (added.segments, added.addresses)
        self._kernels.layer(self._type, known.call, step.call, cache, rows, adapters)
        return normed, residual

    # Attention

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
        """As the reference says. Chunks are left to it that do not consist of whole blocks, or with spans that see each
        other whole."""
        if chunk is not None and (chunk % self.block_size or meta.bidirectional):
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
        own = _own(kv)
        tokens, num_q, size = q.shape
        out = torch.empty((tokens, num_q, size), dtype=q.dtype)
        if tokens > meta.cu_q[-1]:
            out[meta.cu_q[-1] :] = 0
        share, table = num_q // own.spec.num_kv_heads, meta.block_table
        tasks = find_tasks(meta, share)
        if chunk is not None:
            tasks, table = find_chunk_tasks(meta, share, chunk, self.block_size)
        sinks = None if sinks is None else sinks.float().contiguous()
        call = binding.Attention(
            q.data_ptr(),
            out.data_ptr(),
            q.stride(0),
            num_q * size,
            table.data_ptr(),
            table.stride(0),
            tasks.ctypes.data,
            len(tasks),
            num_q,
            scale,
            softcap or 0.0,
            window or 0,
            None if sinks is None else sinks.data_ptr(),
        )
        self._kernels.attention(self._type, call, own.cache)
        return out


@dataclass(frozen=True)
class _PackedPanels(Packed):
    """`weight`: panels; `bias`: float32, one for each of their columns; `layer`: both, as called;
    `sketch`: of a large output matrix."""

    layer: PackedLinear
    sketch: Shortlist | None = None


@dataclass(frozen=True)
class _CpuKV(PagedKV):
    """Keys and values [blocks, kv heads, pages, 16 * padded D]; `raw`: of codes the bytes of all pages, `kept` as in
    `kept_memory`; `cache`: all of it, as called."""

    spec: KVSpec
    cache: "ctypes._CArgObject"
    raw: Tensor | None = None
    kept: Tensor | None = None


def _panels(packed: Packed) -> PackedLinear:
    assert isinstance(packed, _PackedPanels)
    return packed.layer


def _sketch(packed: Packed) -> Shortlist | None:
    assert isinstance(packed, _PackedPanels)
    return packed.sketch


def _own(kv: PagedKV) -> _CpuKV:
    assert isinstance(kv, _CpuKV)
    return kv
