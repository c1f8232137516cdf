"""Ops for CUDA devices: torch's own kernels, attention by `scaled_dot_product_attention`.

The code runs on any torch device: it is tested against the reference on the CPU, and where there is one on a GPU.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.devices.base.hidden_keys import hidden_keys
from services.decoder.devices.base.ops import BaseOps
from services.decoder.steps.attention_meta import AttnMeta, KVSpec, PagedKV


class CudaOps(BaseOps):
    """The default layout; rows of one token as one padded batch, longer rows one after another."""

    name = "cuda"

    def alloc_host_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """Pinned, so that copies to and from the device need no staging."""
        host = super().alloc_host_kv(spec, num_blocks)
        if not torch.cuda.is_available():  # tests of these ops on the CPU
            return host
        return PagedKV(host.k.pin_memory(), host.v.pin_memory())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, H] by torch's fused kernel."""
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def make_meta(
        self,
        counts: Sequence[int],
        kv_lens: Sequence[int],
        block_table: Tensor,
        slots: Tensor,
        bidirectional: list[tuple[int, int, int]] | None = None,
    ) -> AttnMeta:
        """Adds how many keys each row of one token sees, int64 [num_decodes, 1] on the device."""
        meta = super().make_meta(counts, kv_lens, block_table, slots, bidirectional)
        ends = torch.tensor(meta.kv_lens[: meta.num_decodes], dtype=torch.int64)
        if self.device.type == "cuda":
            ends = ends.pin_memory()  # else the host would wait for the copy
        meta.device_state["ends"] = ends.to(self.device, non_blocking=True)[:, None]
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
        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[-1]))
        if meta.num_decodes:
            out[: meta.num_decodes] = self._decode(q, kv, meta, scale, window)
        for row in range(meta.num_decodes, meta.n):
            a, b = meta.cu_q[row], meta.cu_q[row + 1]
            keys, values = self.gather(kv, meta.block_table[row], meta.kv_lens[row])
            mask = ~hidden_keys(meta, row, window, device=q.device)
            out[a:b] = _attend(q[a:b][None], keys[None], values[None], mask, scale)[0]
        return out

    def _decode(
        self, q: Tensor, kv: PagedKV, meta: AttnMeta, scale: float, window: int | None
    ) -> Tensor:
        """All rows of one token, padded to the longest: [num_decodes, num_q, D of v]."""
        n = meta.num_decodes
        width = -(-max(meta.kv_lens[:n]) // self.block_size)
        blocks = meta.block_table[:n, :width].long()
        keys, values = (x[blocks].flatten(1, 2) for x in (kv.k, kv.v))
        ends: Tensor = meta.device_state["ends"]
        order = torch.arange(keys.shape[1], device=q.device)[None, :]
        mask = order < ends
        if window is not None:
            mask &= order >= ends - window
        # Behind the mask lies what others left; zero weight does not undo a NaN.
        values = values.masked_fill(~mask[:, :, None, None], 0)
        # Query heads that share keys are rows of one product, as nothing is hidden from one of them alone.
        groups = q[:n].unflatten(1, (keys.shape[2], -1))
        mixed = F.scaled_dot_product_attention(
            groups,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask[:, None, None, :],
            scale=scale,
        )
        return mixed.flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[n, queries, num_q, D] with keys and values [n, keys, num_kv, D]."""
    shared = q.shape[2] // k.shape[2]
    if shared > 1:  # with `enable_gqa` and a mask torch has no fused kernel
        k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return mixed.transpose(1, 2)
