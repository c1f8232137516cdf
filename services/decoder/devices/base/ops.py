"""Every op as plain torch: the reference that each device's ops are tested against.

Shapes: T tokens of a step (see `AttnMeta`), H hidden size, D head size. A device overrides what it
can do better; a fused op it leaves alone is made of the small ones here.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.devices.base.adapters import Addition, LayerSegments, LinearPlace, Segment
from services.decoder.devices.base.decoder_layer import DecoderLayer
from services.decoder.devices.base.experts import (
    ExpertLayer,
    PackedExperts,
    Router,
    SingleExperts,
    one_by_one,
)
from services.decoder.devices.base.hidden_keys import hidden_keys
from services.decoder.devices.base.largest import first_largest
from services.decoder.devices.base.use import Use
from services.decoder.ranks.rank_group import RankGroup
from services.decoder.ranks.share import Share
from services.decoder.steps.attention_meta import (
    AttnMeta,
    HeadNorms,
    Heads,
    KVSpec,
    Packed,
    PagedKV,
)
from services.decoder.steps.slot_state import LayerState, StateTensor
from shared.weights.coded_rows import CodedRows, Table
from shared.weights.linear_weight import Codes, LinearWeight
from shared.weights.on_the_fly import quantize
from shared.weights.scheme import HEAD, Scheme

_NO_SEGMENTS = LayerSegments((), ())


class BaseOps:
    """The table of ops. One object for each process: it knows the device and the element type."""

    name = "base"
    # The axis of `PagedKV` tensors that counts blocks.
    block_axis = 0
    # What of the model is computed here, and by which calls the ranks that compute the rest of it are reached; None
    # while there are none.
    share = Share()
    ranks: RankGroup | None = None
    # How weights that are stored as numbers are quantized when they are packed; None: not at all.
    scheme: Scheme | None = None
    # Whether weights that are stored as codes are packed as codes, or as the numbers that these stand for.
    keeps_codes = True
    # Whether the cache of tokens has codes of 8 bits, for devices that attend to such (`Device.require_kv_cache`).
    codes_cache = False
    # Layers that were packed as codes, how many weights they have, and what they take.
    coded_layers = 0
    coded_weights = 0
    coded_bytes = 0

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int = 16) -> None:
        """block_size: tokens in a block of the cache."""
        self.device = device
        self.dtype = dtype
        self.block_size = block_size

    @property
    def row_invariant(self) -> bool:
        """Whether a token's result is bit-equal whatever else is in the batch."""
        return False

    def padded_rows(self, rows: int) -> int:
        """How many rows a batch of `rows` tokens should have, padding included."""
        return rows

    def head_width(self, size: int) -> int:
        """How many elements heads of `size` should have, zeros included, so that attention takes them as they are."""
        return size

    # Linear layers

    @final
    def pack(self, weight: LinearWeight) -> Packed:
        """Takes over a weight and its bias; the originals may be dropped after."""
        return self._pack(weight, Use.LINEAR)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """[rows, in] to [rows, out]."""
        return F.linear(x, packed.weight, packed.bias)

    @final
    def pack_gate_up(self, weight: LinearWeight) -> Packed:
        """`pack` for a layer of gates [I, in] above what they gate, for `gate_up_swiglu` alone."""
        return self._pack(weight, Use.GATE_UP)

    @final
    def pack_gelu(self, weight: LinearWeight) -> Packed:
        """`pack` for a layer that a GELU follows, for `linear_gelu` alone."""
        return self._pack(weight, Use.GELU)

    def linear_gelu(self, x: Tensor, packed: Packed) -> Tensor:
        """GELU, by its approximation with tanh, of [rows, in] through a layer from `pack_gelu`."""
        return F.gelu(self.linear(x, packed), approximate="tanh")

    @final
    def pack_head(self, weight: LinearWeight) -> Packed:
        """`pack` for the output matrix [vocabulary, H], for `linear_float32` and `largest`."""
        return self._pack(weight, Use.HEAD)

    @final
    def pack_unchanged(self, weight: LinearWeight) -> Packed:
        """`pack` for a layer that stays as it is stored, whatever `scheme` says."""
        return self._pack(weight, Use.UNCHANGED)

    @final
    def _pack(self, weight: LinearWeight, use: Use) -> Packed:
        """Every `pack` comes here: codes as the device has them, else their numbers."""
        codes = weight.codes() if self.keeps_codes else None
        if codes is None and self.scheme is not None and use is not Use.UNCHANGED:
            codes = partial(quantize, weight, HEAD if use is Use.HEAD else self.scheme)
        if codes is None:
            return self._pack_numbers(weight, use)
        packed = self._pack_codes(weight, codes, use)
        if packed is None:
            packed = self._pack_dense(codes(None).dequantize(self.dtype), weight.bias, use)
        return packed

    def _pack_numbers(self, weight: LinearWeight, use: Use) -> Packed:
        """Of a weight that is not quantized."""
        return self._pack_dense(weight.dense(self.dtype), weight.bias, use)

    def _pack_dense(self, weight: Tensor, bias: Tensor | None, use: Use) -> Packed:
        """[out, in] of the ops' type, and a bias [out] of any. Neither is kept, nor written to."""
        return Packed(
            weight.to(self.device, copy=True).contiguous(),
            None if bias is None else bias.to(self.device, self.dtype, copy=True),
        )

    def _pack_codes(self, weight: LinearWeight, codes: Codes, use: Use) -> Packed | None:
        """For a device that multiplies by codes; None for those of which it multiplies by numbers. codes: of `weight`,
        read when they are packed, a few outputs at a time."""
        return None

    def linear_float32(self, x: Tensor, packed: Packed) -> Tensor:
        """`linear` with results in float32, for logits."""
        return self.linear(x, packed).float()

    def sketched_rows(self, packed: Packed) -> int:
        """Up to how many rows `largest` takes about half the time of `linear_float32` or less; 0 if it never does."""
        return 0

    def largest(self, x: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        """Of each row of `linear_float32` the index [rows] of the largest, the first of equals, and
        the largest itself [rows], which is NaN if there is one among them."""
        return first_largest(self.linear_float32(x, packed))

    def vector(self, weight: Tensor) -> Tensor:
        """Takes over a small parameter of any shape, such as a norm's weight [H], in the model's type."""
        return weight.to(self.device, self.dtype, copy=True)

    def pack_addition(self, place: LinearPlace, down: LinearWeight, up: LinearWeight) -> Addition:
        """Takes over the matrices [rank, inputs] and [outputs, rank] of an addition. Raises InvalidRequest for those
        that do not fit the linear layer."""
        place.require(down, up)
        return Addition(place, self.pack_unchanged(down), self.pack_unchanged(up))

    # Experts

    def pack_experts(
        self, layer: ExpertLayer, up: Iterable[LinearWeight], down: Iterable[LinearWeight]
    ) -> PackedExperts:
        """Takes over the layers into and out of each expert, all of `up` before the first of `down`."""
        return SingleExperts(layer, list(map(self.pack, up)), list(map(self.pack, down)))

    def experts(self, x: Tensor, index: Tensor, shares: Tensor, experts: PackedExperts) -> Tensor:
        """x [T, H]; index and shares [T, k]: a token's experts and what each counts. Gives [T, H]."""
        assert isinstance(experts, SingleExperts)
        return one_by_one(x, index, shares, experts, self.linear)

    def router(self, count: int, k: int) -> Router | None:
        """What chooses k of `count` experts faster than softmax and topk of torch; None where nothing does."""
        return None

    # Small ops

    def embedding_table(self, table: Table) -> Table:
        """Takes over the token embedding [vocabulary, H]: on the device, rows as they are; codes stay codes where that
        is this machine's memory."""
        if isinstance(table, CodedRows):
            return table if self.device.type == "cpu" else table.dense(self.dtype).to(self.device)
        return table.to(self.device)

    def embedding(self, ids: Tensor, table: Table) -> Tensor:
        """Rows [T, H] of what `embedding_table` returned, in the model's type."""
        if isinstance(table, CodedRows):
            return table.rows(ids).to(self.dtype)
        return F.embedding(ids, table).to(self.device, self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, H]; statistics in float32, as Llama does (Zhang and Sennrich, 2019)."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * scaled.to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """[rows, H] less its mean, by its deviation (Ba et al., 2016)."""
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """[rows, H] each: the norm of `x + residual`, and that sum; both may be overwritten."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Takes over a table [length, 1, D] whose sines carry the rotation's minus sign in their first half, in the
        form in which `rope` wants its rows."""
        return cos.to(self.device), sin.to(self.device)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates [T, heads, D] in pairs (i, i + D/2), Su et al., 2021.

        cos, sin: [T, 1, D], rows of what `rotary_table` returned.
        """
        turned = torch.roll(x, x.shape[-1] // 2, -1)
        return x * cos + turned * sin

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of [rows, 2 * I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    # Fused ops

    def head_norms(self, rows: Tensor, heads: Heads, norms: HeadNorms) -> Tensor:
        """Norms of queries and keys [T, num_q + num_kv, D], each head by itself."""
        q = self.rms_norm(rows[:, : heads.num_q], norms.q, norms.eps)
        return torch.cat([q, self.rms_norm(rows[:, heads.num_q :], norms.k, norms.eps)], 1)

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
        """Splits fused rows [T, (num_q + 2 num_kv) * D], norms heads, rotates, writes the cache.

        norms: for models that normalise queries and keys first (Qwen3). Returns q [T, num_q, D],
        k and v [T, num_kv, D].
        """
        rows = qkv.view(qkv.shape[0], -1, heads.size)
        turning = rows[:, : heads.num_q + heads.num_kv]
        if norms is not None:
            turning = self.head_norms(turning, heads, norms)
        turned = self.rope(turning, cos, sin)
        q, k = turned[:, : heads.num_q], turned[:, heads.num_q :]
        v = rows[:, heads.num_q + heads.num_kv :]
        self.kv_write(k, v, kv, meta)
        return q, k, v

    def gate_up_swiglu(
        self,
        x: Tensor,
        packed: Packed,
        segments: Sequence[Segment] = (),
    ) -> Tensor:
        """[rows, H] to [rows, I] through a fused gate-and-up layer, with what segments add before the activation: of
        their outputs the first I are gates."""
        return self.swiglu(self.adapted_linear(x, packed, segments))

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' rows [T, H], which it may overwrite; there must be other ranks."""
        assert self.ranks is not None
        return self.ranks.sum(x)

    def adapted_linear(self, x: Tensor, packed: Packed, segments: Sequence[Segment]) -> Tensor:
        """[rows, in] to [rows, out], with what the segments add."""
        out = self.linear(x, packed)
        self.adapt(x, out, segments)
        return out

    def adapt(self, x: Tensor, out: Tensor, segments: Sequence[Segment]) -> None:
        """Adds to `out` [rows, out], a product of `x` [rows, in], what the segments say, one after the other."""
        for segment in segments:
            rows, addition = segment.rows, segment.addition
            added = self.linear(self.linear(x[rows], addition.down), addition.up)
            out[:, addition.place.first : addition.place.last][rows] += added

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
        """A whole layer: from rows [T, H] after the norm before it and their sums so far to the same
        after it. Both may be overwritten."""
        added = segments or _NO_SEGMENTS
        fused = self.adapted_linear(normed, layer.qkv, added.of("qkv"))
        if layer.row_norms is not None:
            self.row_norms(fused, layer.row_norms)
        q, k, v = self.qkv_rope_write(fused, cos, sin, layer.heads, kv, meta, layer.norms)
        mixed = self.paged_attention(q, k, v, kv, meta, scale=layer.scale, window=layer.window)
        mixed = self.adapted_linear(mixed.flatten(1), layer.output, added.of("output"))
        if self.ranks is not None:
            mixed = self.reduce(mixed)
        if layer.attention_norm is not None:
            mixed = self.rms_norm(mixed, layer.attention_norm, layer.eps)
        normed, residual = self._sum_and_norm(mixed, residual, layer.post_norm, layer.eps)
        gated = self.gate_up_swiglu(normed, layer.gate_up, added.of("gate_up"))
        mixed = self.adapted_linear(gated, layer.down, added.of("down"))
        if self.ranks is not None:
            mixed = self.reduce(mixed)
        if layer.mlp_norm is not None:
            mixed = self.rms_norm(mixed, layer.mlp_norm, layer.eps)
        return self._sum_and_norm(mixed, residual, layer.after_norm, layer.eps)

    def row_norms(self, qkv: Tensor, norms: HeadNorms) -> None:
        """Norms of all queries of a token together, and of all its keys, in fused rows [T, queries | keys | values]."""
        for weight, first in ((norms.q, 0), (norms.k, len(norms.q))):
            part = qkv[:, first : first + len(weight)]
            part.copy_(self.rms_norm(part.contiguous(), weight, norms.eps))

    def _sum_and_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`add_rms_norm`, or without a weight the sum in both places."""
        if weight is not None:
            return self.add_rms_norm(x, residual, weight, eps)
        total = residual + x
        return total, total

    # The cache

    def block_bytes(self, spec: KVSpec) -> int:
        """Bytes that one block takes in one layer, padding of the layout included."""
        return spec.bytes_per_token * self.block_size

    def capacity(self, kv: PagedKV) -> int:
        """Tokens that a cache holds."""
        return kv.k.shape[self.block_axis] * self.block_size

    def alloc_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """One layer's cache, zeroed, its memory touched."""
        return self._zeros(spec, num_blocks, self.device)

    def alloc_host_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """The same layout in host memory, for swapping."""
        return self._zeros(spec, num_blocks, torch.device("cpu"))

    def _zeros(self, spec: KVSpec, num_blocks: int, device: torch.device) -> PagedKV:
        shape = (num_blocks, self.block_size, spec.num_kv_heads)
        return PagedKV(
            torch.zeros((*shape, spec.k_size), dtype=spec.dtype, device=device),
            torch.zeros((*shape, spec.v_size), dtype=spec.dtype, device=device),
        )

    def kv_write(self, k: Tensor, v: Tensor, kv: PagedKV, meta: AttnMeta) -> None:
        """Writes this step's keys and values [T, num_kv, D] where `meta.slots` says."""
        kv.k.flatten(0, 1).index_copy_(0, meta.slots, k)
        kv.v.flatten(0, 1).index_copy_(0, meta.slots, v)

    def scrub(self, kv: PagedKV, slots: Tensor) -> None:
        """Zeroes single tokens of the cache, so that what is not finite cannot spread. slots: int64 [tokens]."""
        kv.k.flatten(0, 1).index_fill_(0, slots, 0)
        kv.v.flatten(0, 1).index_fill_(0, slots, 0)

    def copy_blocks(self, kv: PagedKV, src: Tensor, dst: Tensor) -> None:
        """Copies blocks src[i] to dst[i], int64 on the device; no block may be both."""
        self.swap_blocks(kv, kv, src, dst)

    def swap_blocks(self, source: PagedKV, target: PagedKV, src: Tensor, dst: Tensor) -> None:
        """Copies blocks src[i] of one cache to dst[i] of another of the same layout, on any device. src, dst: int64 on
        the host, or where both caches are on the device there."""
        for old, new in ((source.k, target.k), (source.v, target.v)):
            moved = old.index_select(self.block_axis, src.to(old.device))
            new.index_copy_(self.block_axis, dst.to(new.device), moved.to(new.device))

    def export_block(self, kv: PagedKV, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one block in the canonical layout, [block_size, num_kv, D] each."""
        return kv.k[block].clone(), kv.v[block].clone()

    def import_block(self, kv: PagedKV, block: int, k: Tensor, v: Tensor) -> None:
        """Writes one block given in the canonical layout."""
        kv.k[block] = k.to(kv.k.device)
        kv.v[block] = v.to(kv.v.device)

    # State beside the cache

    def alloc_state(self, specs: Sequence[StateTensor], places: int) -> list[Tensor]:
        """Zeros [places, *shape] for each tensor of one layer's state, all of them touched."""
        shapes = [(places, *spec.shape) for spec in specs]
        return [
            torch.empty(shape, dtype=spec.dtype, device=self.device).zero_()
            for shape, spec in zip(shapes, specs, strict=True)
        ]

    def read_state(self, state: LayerState) -> list[Tensor]:
        """Each tensor of the rows' state [n, *shape] as the step before left it, zeros for rows that begin a
        sequence."""
        return [tensor.index_select(0, state.read) for tensor in state.tensors]

    def write_state(self, state: LayerState, values: Sequence[Tensor]) -> None:
        """Keeps the state that the rows leave: all of it, [n, *shape] for each tensor."""
        for tensor, value in zip(state.tensors, values, strict=True):
            tensor.index_copy_(0, state.write, value.to(tensor.dtype))

    # Attention

    def make_meta(
        self,
        counts: Sequence[int],
        kv_lens: Sequence[int],
        block_table: Tensor,
        slots: Tensor,
        bidirectional: list[tuple[int, int, int]] | None = None,
    ) -> AttnMeta:
        """The description of a batch whose rows of one token come first; block_table int32 [n, blocks] and slots
        int64 [T] are on the device."""
        cu_q = [0]
        for count in counts:
            cu_q.append(cu_q[-1] + count)
        return AttnMeta(
            n=len(counts),
            num_decodes=sum(1 for count in counts if count == 1),
            cu_q=cu_q,
            kv_lens=list(kv_lens),
            block_table=block_table,
            slots=slots,
            max_q=max(counts, default=0),
            max_kv=max(kv_lens, default=0),
            bidirectional=bidirectional,
        )

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
        """Causal attention of each row over its blocks; the cache already holds this step's k, v.

        q [T, num_q, D], k and v [T, num_kv, D] -> [T, num_q, D of v]; padding rows give zeros.
        window: keys a token sees, itself included; chunk: a token sees its own chunk of so many tokens
        alone; softcap: tanh bound of the scores; sinks [num_q]: logits that take part in each softmax
        without a value.
        """
        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[-1]))
        for row in range(meta.n):
            a, b, length = meta.cu_q[row], meta.cu_q[row + 1], meta.kv_lens[row]
            keys, values = self.gather(kv, meta.block_table[row], length)
            repeat = q.shape[1] // keys.shape[1]
            keys = keys.repeat_interleave(repeat, 1).float()
            values = values.repeat_interleave(repeat, 1).float()
            scores = torch.einsum("qhd,khd->hqk", q[a:b].float() * scale, keys)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            hidden = hidden_keys(meta, row, window, chunk).to(scores.device)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                extra = sinks.float()[:, None, None].expand(-1, b - a, 1)
                weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out[a:b] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        return out

    def gather(self, kv: PagedKV, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values [length, num_kv, D] of one row of the block table."""
        blocks = table[: -(-length // self.block_size)].long()
        k, v = (x.index_select(self.block_axis, blocks) for x in (kv.k, kv.v))
        return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]
