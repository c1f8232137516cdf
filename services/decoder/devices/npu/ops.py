"""Ops for Ascend 910B and later: fused operators of torch_npu. None of them waits for the device, but where attention
is left to the reference."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import structlog
import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.base.adapters import Addition, LinearPlace
from services.decoder.devices.base.experts import ExpertLayer, PackedExperts, Router
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.use import Use
from services.decoder.devices.npu.attention import coded_attention, coded_cache, fused_attention
from services.decoder.devices.npu.attention.cache import NpuKV, moved_runs, widened, zeros
from services.decoder.devices.npu.attention.coded_cache import CodedKV
from services.decoder.devices.npu.attention.fused_attention import FusedAttention, padded_size
from services.decoder.devices.npu.attention_call import attention_calls
from services.decoder.devices.npu.forms import (
    Asked,
    Choice,
    Coded,
    CodedHeads,
    Form,
    Forms,
    Grouping,
    Heads,
    Routing,
    Trial,
    Weights,
    Writing,
)
from services.decoder.devices.npu.schemas import supports
from services.decoder.devices.npu.trials import trials
from services.decoder.devices.npu.trials.telling_codes import codes_error
from services.decoder.devices.npu.trials.telling_experts import experts_error, routing_error
from services.decoder.devices.npu.trials.telling_rows import write_error
from services.decoder.devices.npu.weights import coded_linear, grouped_experts, tiled_weights
from services.decoder.devices.npu.weights.coded_linear import CodedLinear
from services.decoder.devices.npu.weights.grouped_experts import GroupedExperts, numbers_of
from services.decoder.steps.attention_meta import AttnMeta, KVSpec, Packed, PagedKV
from shared.hardware.ascend import atb_fault
from shared.weights.coded_rows import CodedRows, Table
from shared.weights.linear_weight import Codes, LinearWeight

log = structlog.get_logger(__name__)

_WIDEST_ROTATION = 896  # elements of a head, from which on the operator refuses

_NO_CHOICE = Choice()


class NpuOps(BaseOps):
    """The default layout, heads filled up with zeros to sizes that the attention kernel knows."""

    name = "npu"
    # What is done with attention that no form of the kernel has.
    without_form: ClassVar[str] = "by the reference, which is slow: no form has this"
    is_310p: ClassVar[bool] = False

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int = 128,
        choice: Choice = _NO_CHOICE,
        weights: str = "nd",
    ) -> None:
        """choice: of forms that are taken untried, or never; weights: see `WeightLayout`."""
        super().__init__(device, dtype, block_size)
        self._weights = weights
        self.forms = Forms(self.known_forms, partial(trials.kept_or_tried, self), choice)
        self._moves = torch_npu.npu.Stream(device)
        self._told: set[str] = set()  # why weights of codes have become numbers

    def head_width(self, size: int) -> int:
        """As heads are in the cache."""
        return padded_size(size)

    # Linear layers and small ops

    def _pack_dense(self, weight: Tensor, bias: Tensor | None, use: Use) -> Packed:
        packed = super()._pack_dense(weight, bias, use)
        if not self._is_tiled(packed.weight, use):
            return packed
        return Packed(tiled_weights.tiled(packed.weight), packed.bias)

    def _is_tiled(self, weight: Tensor, use: Use) -> bool:
        """Whether a weight [out, inputs] lies in tiles here; those of outputs do not, as with others."""
        if self._weights == "nd" or use is Use.HEAD or not tiled_weights.fits(weight):
            return False
        out, inputs = weight.shape
        return self.forms.form(Weights(out, inputs, self._weights == "auto")) is not None

    def _pack_codes(self, weight: LinearWeight, codes: Codes, use: Use) -> Packed | None:
        """In a form that is right for codes of this kind and size; None where there is none, which is logged."""
        part, sizes = codes(np.arange(min(1, weight.out))), coded_linear.piece_sizes(weight.out)
        why = coded_linear.problem(part)
        asked = [] if why else [coded_linear.asked_for(part, size) for size in sorted(set(sizes))]
        found = {self.forms.form(each) for each in asked}
        form = found.pop() if len(found) == 1 else None
        if form is None:
            self._tell_numbers(weight, why or "no operator multiplies with such codes here")
            return None
        packed = coded_linear.pack(codes, sizes, weight.bias, form, (self.dtype, self.device))
        self.coded_layers += 1
        self.coded_weights += weight.out * weight.inputs
        self.coded_bytes += packed.num_bytes
        return packed

    def _tell_numbers(self, weight: LinearWeight, why: str) -> None:
        """Once for each reason."""
        if why not in self._told:
            self._told.add(why)
            kind = str(self.dtype).removeprefix("torch.")
            log.warning(f"quantized weights become {kind}", first=weight.name, reason=why)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """[rows, in] to [rows, out]."""
        if isinstance(packed, CodedLinear):
            return coded_linear.product(x, packed)
        return super().linear(x, packed)

    def pack_addition(self, place: LinearPlace, down: LinearWeight, up: LinearWeight) -> Addition:
        """In rows: additions come while others are served, when no layout is to be tried."""
        if self._weights == "nd":
            return super().pack_addition(place, down, up)
        place.require(down, up)
        rows = [
            BaseOps._pack_dense(self, numbers_of(part, self.dtype), part.bias, Use.LINEAR)
            for part in (down, up)
        ]
        return Addition(place, *rows)

    def largest(self, x: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        """The index by a comparison: the operator's own may be that of any of equals."""
        logits = self.linear_float32(x, packed)
        values = logits.amax(-1)
        return (logits == values[:, None]).float().argmax(-1), values

    def embedding_table(self, table: Table) -> Tensor:
        """In the model's type, so that rows need no conversion."""
        numbers = table.dense(self.dtype) if isinstance(table, CodedRows) else table.to(self.dtype)
        return numbers.to(self.device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, H]."""
        normed: Tensor = torch_npu.npu_rms_norm(x.contiguous(), weight, eps)[0]
        return normed

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Norm and sum by one operator; what it gives between them is of no use here."""
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Sines without the sign in their first half: the operator puts it there itself."""
        half = sin.shape[-1] // 2
        plain = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return super().rotary_table(cos, plain)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates [T, heads, D]; cos, sin: [T, 1, D]."""
        if x.shape[-1] >= _WIDEST_ROTATION:
            return self.rope_by_torch(x, cos, sin)
        turned: Tensor = torch_npu.npu_rotary_mul(x.contiguous()[None], cos[None], sin[None])
        return turned[0]

    def rope_by_torch(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The same by plain operations."""
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of [rows, 2 * I]."""
        mixed: Tensor = torch_npu.npu_swiglu(gate_up.contiguous())
        return mixed

    # Experts

    def pack_experts(
        self, layer: ExpertLayer, up: Iterable[LinearWeight], down: Iterable[LinearWeight]
    ) -> PackedExperts:
        """In the form that is right for them; one by one where tokens may go to none."""
        asked = Grouping(layer.count, layer.hidden, layer.up, layer.inner, layer.has_bias)
        form = None if layer.skips else self.forms.form(asked)
        return self.experts_in(form, layer, up, down)

    def experts_in(
        self,
        form: Form | None,
        layer: ExpertLayer,
        up: Iterable[LinearWeight],
        down: Iterable[LinearWeight],
    ) -> PackedExperts:
        """`pack_experts` in a form; None: as the reference has them."""
        if form is None:
            return super().pack_experts(layer, up, down)
        options = (self.dtype, self.device)
        return GroupedExperts(
            layer,
            form,
            grouped_experts.stack(up, layer, (layer.hidden, layer.up), form, options),
            grouped_experts.stack(down, layer, (layer.inner, layer.hidden), form, options),
        )

    def experts(self, x: Tensor, index: Tensor, shares: Tensor, experts: PackedExperts) -> Tensor:
        """See `BaseOps.experts`; not one by one it waits for nothing."""
        if not isinstance(experts, GroupedExperts):
            return super().experts(x, index, shares, experts)
        return grouped_experts.run(x, index, shares, experts, self.swiglu, self.is_310p)

    def router(self, count: int, k: int) -> Router | None:
        """By the operator for it."""
        form = self.forms.form(Routing(count, k))
        return None if form is None else partial(grouped_experts.choose, k=k)

    # The cache

    def block_bytes(self, spec: KVSpec) -> int:
        """With the zeros that heads are filled up with, and the scales of codes."""
        if spec.coded:
            return coded_cache.block_bytes(spec, self.block_size)
        width = padded_size(max(spec.k_size, spec.v_size))
        return 2 * self.block_size * spec.num_kv_heads * width * spec.dtype.itemsize

    def _zeros(self, spec: KVSpec, num_blocks: int, device: torch.device) -> PagedKV:
        return self._made(spec, num_blocks, device)

    def _made(self, spec: KVSpec, num_blocks: int, device: torch.device | None) -> PagedKV:
        if spec.coded:
            return CodedKV.make(spec, num_blocks, self.block_size, device)
        width = padded_size(max(spec.k_size, spec.v_size))
        shape = (num_blocks, self.block_size, spec.num_kv_heads, width)
        k, v = (zeros(shape, spec.dtype, device) for _ in range(2))
        return NpuKV(k, v, spec.k_size, spec.v_size)

    def alloc_host_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """Pinned, so that copies to and from the device need no staging."""
        return self._made(spec, num_blocks, None)

    def kv_write(self, k: Tensor, v: Tensor, kv: PagedKV, meta: AttnMeta) -> None:
        """Writes this step's keys and values [T, num_kv, D] where `meta.slots` says; no slot may be there twice."""
        if isinstance(kv, CodedKV):
            self.write_codes(k, v, kv, meta.slots, self._scale_places(kv, meta))
            return
        _, width = self.cached_heads(kv)
        self.write(widened(k, width), widened(v, width), kv, meta.slots)

    def write_codes(self, k: Tensor, v: Tensor, kv: CodedKV, slots: Tensor, places: Tensor) -> None:
        """Keys and values [n, num_kv, D] as codes to slots, int32 [n]; their scales to places, see `CodedKV.places`."""
        codes, scales = kv.coded(k, v)
        self.write(*codes, kv, slots)
        for cache, some in zip((kv.k_scales, kv.v_scales), scales, strict=True):
            cache.view(-1).index_put_((places,), some.flatten())

    def _scale_places(self, kv: CodedKV, meta: AttnMeta) -> Tensor:
        """Found by the first layer of a step, for all. What was found before a capture would not follow its inputs."""
        captured = torch_npu.npu.is_current_stream_capturing()
        key = f"scales of {kv.k_scales.shape[1]} heads{' in a graph' if captured else ''}"
        if key not in meta.device_state:
            meta.device_state[key] = kv.places(meta.slots)
        found: Tensor = meta.device_state[key]
        return found

    def scrub(self, kv: PagedKV, slots: Tensor) -> None:
        """Writes zeros."""
        slots = slots.to(torch.int32)
        blank = torch.zeros(
            (len(slots), *self.cached_heads(kv)), dtype=kv.k.dtype, device=self.device
        )
        self.write(blank, blank, kv, slots)
        if isinstance(kv, CodedKV):
            places = kv.places(slots)
            for cache in (kv.k_scales, kv.v_scales):
                none = torch.zeros(len(places), dtype=cache.dtype, device=self.device)
                cache.view(-1).index_put_((places,), none)

    def cached_heads(self, kv: PagedKV) -> tuple[int, int]:
        """Heads of keys in a cache, and elements of each."""
        return kv.k.shape[2], kv.k.shape[3]

    def write(self, k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> None:
        """Puts keys and values of the cache's own width [n, num_kv, P] at slots, int32 [n]."""
        asked = Writing(*self.cached_heads(kv), coded=isinstance(kv, CodedKV))
        form = self.forms.form(asked)
        self.write_by(form, k, v, kv, slots)

    def write_by(self, form: Form | None, k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> None:
        """`write` in a form; None: as plain torch does it."""
        if form is None or form.layout == "index_put":
            self.put(k, v, kv, slots.long())
        elif form.layout == "scatter_pa":
            torch_npu.npu_scatter_pa_kv_cache(k, v, kv.k, kv.v, slots, cache_mode="Norm")
        else:
            torch_npu._npu_reshape_and_cache(k, v, kv.k, kv.v, slots)

    def put(self, k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> None:
        """By plain torch; slots: int64 [n]."""
        kv.k.flatten(0, 1).index_put_((slots,), k)
        kv.v.flatten(0, 1).index_put_((slots,), v)

    def swap_blocks(self, source: PagedKV, target: PagedKV, src: Tensor, dst: Tensor) -> None:
        """Between device and host, on a stream of its own: behind what was submitted before, before what comes."""
        pairs = list(zip(_own(source).pairs(), _own(target).pairs(), strict=True))
        if source.k.device == target.k.device:
            for ours, theirs in pairs:
                super().swap_blocks(PagedKV(*ours), PagedKV(*theirs), src, dst)
            return
        compute = torch_npu.npu.current_stream()
        self._moves.wait_stream(compute)
        with torch_npu.npu.stream(self._moves):
            for first, place, count in moved_runs(src, dst):
                for olds, news in pairs:
                    for old, new in zip(olds, news, strict=True):
                        moved = old[first : first + count]
                        new[place : place + count].copy_(moved, non_blocking=True)
        compute.wait_stream(self._moves)

    def export_block(self, kv: PagedKV, block: int) -> tuple[Tensor, Tensor]:
        """One block in the canonical layout (token of the block, kv head, element); codes as bytes, see `CodedKV`."""
        return _own(kv).read(block)

    def import_block(self, kv: PagedKV, block: int, k: Tensor, v: Tensor) -> None:
        """Writes one block given in the canonical layout."""
        _own(kv).replace_block(block, k, v)

    # Attention

    def make_meta(
        self,
        counts: Sequence[int],
        kv_lens: Sequence[int],
        block_table: Tensor,
        slots: Tensor,
        bidirectional: list[tuple[int, int, int]] | None = None,
    ) -> AttnMeta:
        """Adds the calls that attention takes; slots become int32."""
        slots = slots.to(torch.int32)
        meta = super().make_meta(counts, kv_lens, block_table, slots, bidirectional)
        meta.device_state["calls"] = attention_calls(meta, self.send)
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
        """As the reference says; chunks, soft caps, and spans under a window are left to it. Raises InvalidRequest for
        codes that no form attends to."""
        if isinstance(kv, CodedKV):
            others = {"window": window, "chunk": chunk, "softcap": softcap, "sinks": sinks}
            return coded_attention.of_step(self, q, k, v, kv, meta, scale, others)
        width = kv.k.shape[-1]
        heads = Heads(q.shape[1], kv.k.shape[2], width, window is not None, sinks is not None)
        cut = window is not None and bool(meta.bidirectional)
        form = None if chunk or softcap is not None or cut else self.forms.form(heads)
        if form is None:
            if torch_npu.npu.is_current_stream_capturing():
                raise RuntimeError(f"attention without a fused kernel keeps its lengths: {heads}")
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
        calls = meta.device_state["calls"]
        tokens = meta.cu_q[-1]
        wide = widened(q[:tokens], width)
        found = self._fused.attend(wide, kv, calls, form, scale, window, sinks)
        found = found[..., : v.shape[-1]]
        if tokens == q.shape[0]:
            return found
        out = found.new_zeros((q.shape[0], *found.shape[1:]))
        out[:tokens] = found
        return out

    # Forms

    def known_forms(self, asked: Asked) -> Sequence[Form]:
        """Every form that there is for something, those first that are faster."""
        match asked:
            case Heads():
                return self.attention_forms(asked)
            case CodedHeads():
                return [] if self.is_310p else coded_attention.forms(asked)
            case Writing():
                return [Form(name) for name in self.write_forms()]
            case Grouping():
                return grouped_experts.forms(asked, self.is_310p)
            case Routing():
                return grouped_experts.routing_forms(asked, self.is_310p)
            case Weights():
                return [tiled_weights.TILED]
            case Coded():
                return coded_linear.forms(asked, self.is_310p)

    def try_form(self, asked: Asked, form: Form) -> Trial:
        """Waits for the device, which a kernel that fails may leave useless for this process."""
        try:
            error, most = self._error_of(asked, form)
        except (RuntimeError, OSError) as refusal:
            return Trial(form, math.inf, False, str(refusal).strip().partition("\n")[0])
        return Trial(form, error, error <= most)

    def _error_of(self, asked: Asked, form: Form) -> tuple[float, float]:
        """How far a form is from the reference, and how far it may be."""
        match asked:
            case Heads():
                return self.attention_error(asked, form)
            case CodedHeads():
                return coded_attention.error(self, asked, form)
            case Writing():
                return write_error(self, asked, form), 0.0
            case Grouping():
                return experts_error(self, asked, form)
            case Routing():
                return routing_error(grouped_experts.choose, asked, self.device)
            case Weights():
                return tiled_weights.weight_error(asked, self.dtype, self.device)
            case Coded():
                return codes_error(asked, form, self.dtype, self.device)

    def attention_forms(self, heads: Heads) -> Sequence[Form]:
        """For these heads."""
        return list(fused_attention.forms(heads))

    def attention_error(self, heads: Heads, form: Form) -> tuple[float, float]:
        """How far it is from the reference, and how far it may be."""
        return self._fused.error(heads, form)

    def write_forms(self) -> Iterator[str]:
        """A mode that is not named means another layout, so an operator that knows none cannot be taken."""
        if supports("_npu_reshape_and_cache") and not atb_fault():
            yield "reshape_and_cache"
        if supports("npu_scatter_pa_kv_cache", "cache_mode"):
            yield "scatter_pa"
        yield "index_put"

    @cached_property
    def _fused(self) -> FusedAttention:
        return FusedAttention(self.device, self.dtype, self.block_size)

    def gather(self, kv: PagedKV, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Without the zeros that heads are filled up with."""
        k, v = _own(kv).numbers(table[: -(-length // self.block_size)].long())
        return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]

    def send(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> Tensor:
        """A small host array on the device; nothing waits for the transfer."""
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)


def _own(kv: PagedKV) -> NpuKV:
    assert isinstance(kv, NpuKV)
    return kv
