"""Ops for CUDA devices: torch's own kernels, and for attention and weights of codes kernels in Triton's language where
these are right (`kernel_trials.py`).

The code runs on any torch device: it is tested against the reference on the CPU, and where there is one on a GPU.
"""

from collections.abc import Sequence
from functools import cached_property
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.use import Use
from services.decoder.devices.cuda import coded_linear, kernel_trials, padded_attention
from services.decoder.devices.cuda.coded_linear import CodedLinear
from services.decoder.steps.attention_meta import AttnMeta, KVSpec, Packed, PagedKV
from shared.weights.linear_weight import Codes, LinearWeight


class CudaOps(BaseOps):
    """The default layout; all rows of a step attend in few calls."""

    name = "cuda"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int = 16,
        *,
        has_kernels: bool = False,
    ) -> None:
        """has_kernels: whether kernels are tried, for which device or environment must be theirs."""
        super().__init__(device, dtype, block_size)
        # Those of float32 have no tensor cores, and take minutes to compile.
        self._has_kernels = has_kernels and dtype != torch.float32
        self._linears: dict[object, ModuleType | None] = {}  # by kinds of codes
        self._torch_attends = False

    @cached_property
    def _attention(self) -> ModuleType | None:
        """None where torch attends."""
        return kernel_trials.right_attention(self) if self._has_kernels else None

    @property
    def reads_what_rows_have(self) -> bool:
        """Whether attention to rows of one token, of the layers that have been seen so far, takes no longer where the
        step could have had longer ones."""
        return self._attention is not None and not self._torch_attends

    # Linear layers

    def _pack_codes(self, weight: LinearWeight, codes: Codes, use: Use) -> Packed | None:
        """All kinds of codes."""
        packed = coded_linear.pack(codes, weight.out, weight.bias, self.dtype, self.device)
        if self._has_kernels and packed.run and packed.kind not in self._linears:
            self._linears[packed.kind] = kernel_trials.right_linear(packed, self.dtype)
        self.coded_layers += 1
        self.coded_weights += weight.out * weight.inputs
        self.coded_bytes += packed.num_bytes
        return packed

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """[rows, in] to [rows, out]."""
        if not isinstance(packed, CodedLinear):
            return super().linear(x, packed)
        if packed.order is not None:
            x = x.index_select(1, packed.order)
        kernels = self._linears.get(packed.kind)
        if kernels is None:
            return coded_linear.product(x, packed)
        if len(x) > kernels.MOST_ROWS:
            return coded_linear.product(x, packed, kernels.numbers)
        found: Tensor = kernels.product(x, packed)
        return found

    # The cache

    def alloc_host_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """Pinned, so that copies to and from the device need no staging."""
        host = super().alloc_host_kv(spec, num_blocks)
        if not torch.cuda.is_available():  # tests of these ops on the CPU
            return host
        return PagedKV(host.k.pin_memory(), host.v.pin_memory())

    # Small ops

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, H] by torch's fused kernel."""
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    # Attention

    def make_meta(
        self,
        counts: Sequence[int],
        kv_lens: Sequence[int],
        block_table: Tensor,
        slots: Tensor,
        bidirectional: list[tuple[int, int, int]] | None = None,
    ) -> AttnMeta:
        """Adds, int64 on the device: how many keys each row's last token sees (`lengths` [n]), and where rows begin
        among the tokens, with their end (`starts` [n + 1])."""
        meta = super().make_meta(counts, kv_lens, block_table, slots, bidirectional)
        # Kernels are compiled anew where a tensor begins between multiples of 16 bytes.
        begin = meta.n + meta.n % 2
        filler = [0] * (begin - meta.n)
        both = torch.tensor([*meta.kv_lens, *filler, *meta.cu_q], dtype=torch.int64)
        if self.device.type == "cuda":
            both = both.pin_memory()  # else the host would wait for the copy
        here = both.to(self.device, non_blocking=True)
        meta.device_state.update(lengths=here[: meta.n], starts=here[begin:])
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
            self._torch_attends = True
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
        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[-1]))
        kernels = self._attention
        if kernels is not None and kernels.takes(q, kv):
            kernels.attend(q, kv, meta, out, scale, window)
        else:
            self._torch_attends = True
            padded_attention.attend(q, kv, meta, out, scale, window)
        return out
