"""Attention by CANN's fused kernel (`npu_fused_infer_attention_score`) and its forms."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.npu.attention_call import AttentionCall
from services.decoder.devices.npu.forms import Form, Heads
from services.decoder.devices.npu.schemas import supports
from services.decoder.devices.npu.trials.telling_batch import TellingBatch
from services.decoder.steps.attention_meta import PagedKV

TND_SIZES = (64, 128, 192)
_LARGEST_TND, _LARGEST = 256, 512  # older releases of CANN take heads of TND_SIZES alone
_ROUNDING = 16  # elements, to whose multiple heads of other sizes are filled up
_MASK = 2048
_NO_LIMIT = 2147483647
_UNMASKED, _CAUSAL, _BAND = 0, 3, 4


def padded_size(size: int) -> int:
    """The size of a head in the cache: what is missing to one that the kernel knows is zeros."""
    for known in TND_SIZES:
        if size <= known:
            return known
    return -(-size // _ROUNDING) * _ROUNDING


class FusedAttention:
    """Calls of the kernel, and trials of its forms."""

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        self._device, self._dtype, self._block_size = device, dtype, block_size
        # 1 hides: a query must not see what is behind it.
        mask = torch.ones((_MASK, _MASK), dtype=torch.int8).triu(1)
        self._mask = mask.to(device)

    def attend(
        self,
        q: Tensor,
        kv: PagedKV,
        calls: Sequence[AttentionCall],
        form: Form,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Queries [T, num_q, P] over a cache [blocks, block_size, num_kv, P]: [T, num_q, P]."""
        if len(calls) == 1 and calls[0].tokens is None:
            return self._call(q, kv, calls[0], form, scale, window, sinks)
        out = torch.zeros_like(q)
        for call in calls:
            assert call.tokens is not None
            some = q.index_select(0, call.tokens)
            found = self._call(some, kv, call, form, scale, window, sinks)
            out.index_copy_(0, call.tokens, found)
        return out

    def error(self, heads: Heads, form: Form) -> tuple[float, float]:
        """How far a form is from the reference, and how far it may be. Waits for the device."""
        batch = TellingBatch.draw(
            self._dtype, self._block_size, (heads.num_q, heads.num_kv, heads.size)
        )
        batch = batch.with_window() if heads.window else batch
        batch = batch.with_sinks() if heads.sinks else batch
        batch = batch.on(self._device)
        found = self.attend(
            batch.q, batch.kv, [batch.call], form, batch.scale, batch.window, batch.sinks
        )
        return batch.error(found), batch.tolerance

    def _call(
        self,
        q: Tensor,
        kv: PagedKV,
        call: AttentionCall,
        form: Form,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        mode = _UNMASKED if not call.causal else _CAUSAL if window is None else _BAND
        reach = window + form.window_offset if window is not None else _NO_LIMIT
        options = _Options(scale, mode, reach, self._mask if call.causal else None, sinks)
        if form.layout == "TND":
            return _score(q, kv, call.ends, call.kv_lens, call.table, "TND", options)
        return self._by_sequence(q, kv, call, options)

    def _by_sequence(
        self, q: Tensor, kv: PagedKV, call: AttentionCall, options: "_Options"
    ) -> Tensor:
        """All sequences of one query, which stand first, as a batch; the others one by one."""
        out = torch.empty_like(q)
        starts = [0, *call.ends[:-1]]
        ones = next((i for i, end in enumerate(call.ends) if end != i + 1), len(call.ends))
        if ones:
            some = _score(
                q[:ones, None], kv, None, call.kv_lens[:ones], call.table[:ones], "BSND", options
            )
            out[:ones] = some[:, 0]
        for i in range(ones, len(call.ends)):
            rows, one = slice(starts[i], call.ends[i]), slice(i, i + 1)
            length = [call.ends[i] - starts[i]]
            some = _score(
                q[None, rows], kv, length, call.kv_lens[one], call.table[one], "BSND", options
            )
            out[rows] = some[0]
        return out


@dataclass(frozen=True)
class _Options:
    scale: float
    mode: int
    reach: int  # tokens before a query that it sees
    mask: Tensor | None
    sinks: Tensor | None


def forms(heads: Heads) -> Iterator[Form]:
    """Every form that these heads may have, those first that are faster."""
    if heads.sinks and not supports("npu_fused_infer_attention_score_v2", "learnable_sink"):
        return
    if not supports("npu_fused_infer_attention_score", "block_table") or heads.size > _LARGEST:
        return
    # Sources disagree on whether a window counts the query itself.
    offsets = (-1, 0) if heads.window else (-1,)
    if heads.size <= _LARGEST_TND:
        yield from (Form("TND", offset) for offset in offsets)
    if not heads.window:  # of a single query this layout ignores the window
        yield Form("BSND")


def _score(
    q: Tensor,
    kv: PagedKV,
    lengths: list[int] | None,
    kv_lens: list[int],
    table: Tensor,
    layout: str,
    options: _Options,
) -> Tensor:
    """One call of the kernel. Lengths are lists: tensors would be waited for."""
    blocks, size, num_kv, width = kv.k.shape
    k, v = kv.k.view(blocks, size, num_kv * width), kv.v.view(blocks, size, num_kv * width)
    ahead = 0 if options.mode == _BAND else _NO_LIMIT
    result: Any
    if options.sinks is not None:
        result = torch_npu.npu_fused_infer_attention_score_v2(
            q,
            k,
            v,
            atten_mask=options.mask,
            actual_seq_qlen=lengths,
            actual_seq_kvlen=kv_lens,
            block_table=table,
            learnable_sink=options.sinks.to(torch.bfloat16),
            num_query_heads=q.shape[-2],
            num_key_value_heads=num_kv,
            softmax_scale=options.scale,
            pre_tokens=options.reach,
            next_tokens=ahead,
            input_layout=layout,
            sparse_mode=options.mode,
            block_size=size,
        )
    else:
        result = torch_npu.npu_fused_infer_attention_score(
            q,
            k,
            v,
            atten_mask=options.mask,
            actual_seq_lengths=lengths,
            actual_seq_lengths_kv=kv_lens,
            block_table=table,
            num_heads=q.shape[-2],
            num_key_value_heads=num_kv,
            scale=options.scale,
            pre_tokens=options.reach,
            next_tokens=ahead,
            input_layout=layout,
            sparse_mode=options.mode,
            block_size=size,
        )
    found: Tensor = result[0]
    return found
