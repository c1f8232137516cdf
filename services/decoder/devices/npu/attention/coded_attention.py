"""Attention to keys and values of 8 bits. The fused kernel is documented for them where each sequence has one query,
without a window; all other rows attend to the numbers that their blocks' codes mean, a few rows at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.npu.attention.coded_cache import CodedKV
from services.decoder.devices.npu.attention.fused_attention import padded_size
from services.decoder.devices.npu.attention_call import Span
from services.decoder.devices.npu.forms import CodedHeads, Form, Forms
from services.decoder.devices.npu.schemas import supports
from services.decoder.devices.npu.trials.telling_batch import TellingBatch
from services.decoder.steps.attention_meta import AttnMeta, KVSpec, PagedKV
from shared import kv_cache_dtype

_PER_TOKEN_AND_HEAD = 5  # whose scales lie in blocks
_LARGEST = 512
# Queries [n, 1, heads, P] or [n, heads, 1, P], over the same cache.
BSND, BNSD = Form("int8_BSND"), Form("int8_BNSD")
# Elements of keys that become numbers at once, unless one row has more.
_MOST_AT_ONCE = 1 << 25


def forms(heads: CodedHeads) -> list[Form]:
    """Every form that there is, in the order in which they are tried."""
    known = supports(
        "npu_fused_infer_attention_score",
        *("block_table", "key_antiquant_scale", "value_antiquant_scale"),
        *("key_antiquant_mode", "value_antiquant_mode"),
    )
    return [BSND, BNSD] if known and heads.width <= _LARGEST else []


def attend(
    q: Tensor, kv: CodedKV, table: Tensor, kv_lens: list[int], form: Form, scale: float
) -> Tensor:
    """Queries [n, num_q, D] of one token of each sequence, which sees all of its keys: [n, num_q, P]. table: int32
    [n, blocks]."""
    blocks, size, num_kv, width = kv.k.shape
    wide = kv.widened_queries(q)
    axis = 1 if form == BSND else 2
    result: Any = torch_npu.npu_fused_infer_attention_score(
        wide.unsqueeze(axis),
        kv.k.view(blocks, size, num_kv * width),
        kv.v.view(blocks, size, num_kv * width),
        actual_seq_lengths_kv=kv_lens,
        block_table=table,
        key_antiquant_scale=kv.k_scales,
        value_antiquant_scale=kv.v_scales,
        key_antiquant_mode=_PER_TOKEN_AND_HEAD,
        value_antiquant_mode=_PER_TOKEN_AND_HEAD,
        num_heads=q.shape[1],
        num_key_value_heads=num_kv,
        scale=scale,
        input_layout="BSND" if form == BSND else "BNSD",
        block_size=size,
    )
    found: Tensor = result[0]
    return found.squeeze(axis)


class Operators(Protocol):
    """What attends, such as `NpuOps`."""

    dtype: torch.dtype
    device: torch.device
    block_size: int
    forms: Forms

    def alloc_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """Zeros."""

    def write_codes(self, k: Tensor, v: Tensor, kv: CodedKV, slots: Tensor, places: Tensor) -> None:
        """Writes keys and values [n, num_kv, D] to slots, int32 [n], and their scales to places."""

    def make_meta(
        self,
        counts: Sequence[int],
        kv_lens: Sequence[int],
        block_table: Tensor,
        slots: Tensor,
        bidirectional: list[Span] | None = None,
    ) -> AttnMeta:
        """See `BaseOps.make_meta`."""

    def send(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> Tensor:
        """A small host array on the device; nothing waits for the transfer."""

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
        """See `BaseOps.paged_attention`."""


def of_step(
    ops: Operators,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: CodedKV,
    meta: AttnMeta,
    scale: float,
    others: dict[str, Any],
) -> Tensor:
    """`BaseOps.paged_attention` over codes: by the kernel where a row has a single query that sees all keys, else over
    numbers that are made of them. others: what else is asked. Raises InvalidRequest where no form of the kernel is
    right."""
    alone = 0
    found: Tensor | None = None
    if all(value is None for value in others.values()) and not meta.bidirectional:
        # Of prompts too, so that it is known before anything is served whether there is one.
        form, alone = _form(ops.forms, q.shape[1], kv), meta.num_decodes
        if alone:
            table, lengths = meta.block_table[:alone], meta.kv_lens[:alone]
            found = attend(q[:alone], kv, table, lengths, form, scale)[..., : v.shape[-1]]
            if alone == len(q):
                return found
    out = q.new_zeros((q.shape[0], q.shape[1], v.shape[-1]))
    if found is not None:
        out[:alone] = found
    if alone == meta.n:
        return out
    if torch_npu.npu.is_current_stream_capturing():
        raise RuntimeError("attention to numbers that are made of codes keeps its lengths")
    width = padded_size(max(kv.k_size, kv.v_size))
    for group in _groups(ops, kv, meta, range(alone, meta.n), others["window"]):
        numbers = kv.numbers_as(ops.dtype, group.blocks, width)
        own = slice(group.first, group.end)
        out[own] = ops.paged_attention(
            q[own], k[own], v[own], numbers, group.meta, scale=scale, **others
        )
    return out


def _form(forms: Forms, num_q: int, kv: CodedKV) -> Form:
    num_kv, width = kv.k.shape[2:]
    upper = 0 if kv.upper is None else kv.upper.count
    form = forms.form(CodedHeads(num_q, num_kv, kv.size, width, upper))
    if form is None:
        raise kv_cache_dtype.refused(
            kv_cache_dtype.INT8,
            f"no form of the kernel attends to {num_kv} heads of {kv.size} elements in codes here (the log says what"
            " came of each); leave the flag away",
        )
    return form


@dataclass(frozen=True)
class NumbersGroup:
    """Rows that attend to numbers at once: their tokens are [first, end) of the step's, their keys those of `blocks`,
    int64 on the device, of which `meta` speaks as of a cache of these alone."""

    first: int
    end: int
    blocks: Tensor
    meta: AttnMeta


def _groups(
    ops: Operators, kv: CodedKV, meta: AttnMeta, rows: range, window: int | None
) -> list[NumbersGroup]:
    """Found by the first layer of a step, for all that are alike. Each has as many rows as have `_MOST_AT_ONCE`
    elements of keys, or one."""
    blocks_at_once = _MOST_AT_ONCE // kv.k[0].numel()
    key = f"groups {rows} {window} {blocks_at_once}"
    if key not in meta.device_state:
        parts = _parted(meta, rows, window, ops.block_size, blocks_at_once)
        meta.device_state[key] = [_group(ops, meta, part) for part in parts]
    found: list[NumbersGroup] = meta.device_state[key]
    return found


Seen = tuple[int, int, int]  # a row, the first block that it sees, and the block after the last


def _parted(
    meta: AttnMeta, rows: range, window: int | None, block_size: int, blocks_at_once: int
) -> Iterator[list[Seen]]:
    """Blocks that a window hides from all queries of a row are left out."""
    part: list[Seen] = []
    blocks = 0
    for row in rows:
        length, count = meta.kv_lens[row], meta.cu_q[row + 1] - meta.cu_q[row]
        hidden = 0 if window is None else max(0, length - count - window + 1)
        one = (row, hidden // block_size, -(-length // block_size))
        blocks += one[2] - one[1]
        if part and blocks > blocks_at_once:
            yield part
            part, blocks = [], one[2] - one[1]
        part.append(one)
    if part:
        yield part


def _group(ops: Operators, meta: AttnMeta, part: Sequence[Seen]) -> NumbersGroup:
    widths = [last - first for _, first, last in part]
    blocks = torch.cat([meta.block_table[row, first:last] for row, first, last in part]).long()
    table = np.zeros((len(part), max(widths)), np.int64)
    spans: list[Span] = []
    for place, (row, first, _) in enumerate(part):
        begin, hidden = sum(widths[:place]), first * ops.block_size
        table[place, : widths[place]] = np.arange(begin, begin + widths[place])
        spans += [
            (place, max(0, low - hidden), high - hidden)
            for other, low, high in meta.bidirectional or ()
            if other == row and high > hidden
        ]
    first, end = meta.cu_q[part[0][0]], meta.cu_q[part[-1][0] + 1]
    own = ops.make_meta(
        [meta.cu_q[row + 1] - meta.cu_q[row] for row, _, _ in part],
        [meta.kv_lens[row] - first * ops.block_size for row, first, _ in part],
        ops.send(table).to(torch.int32),
        meta.slots[first:end],
        spans or None,
    )
    return NumbersGroup(first, end, blocks, own)


def error(ops: Operators, heads: CodedHeads, form: Form) -> tuple[float, float]:
    """How far a form is from the reference with the numbers that codes mean, and how far it may be; infinity where
    codes are not near what was written. Waits for the device."""
    batch = TellingBatch.draw(
        ops.dtype, ops.block_size, (heads.num_q, heads.num_kv, heads.size), chunks=False
    )
    batch = batch.with_large_elements(range(heads.upper))
    kept = tuple(tuple(range(heads.upper)) for _ in range(heads.num_kv)) if heads.upper else ()
    spec = KVSpec(heads.num_kv, heads.size, heads.size, ops.dtype, coded=True, kept=kept)
    kv = ops.alloc_kv(spec, len(batch.kv.k))
    assert isinstance(kv, CodedKV)
    rows = [x.flatten(0, 1).to(ops.device) for x in (batch.kv.k, batch.kv.v)]
    slots = torch.arange(len(rows[0]), dtype=torch.int32, device=ops.device)
    ops.write_codes(rows[0], rows[1], kv, slots, kv.places(slots))
    stored = kv.on_host()
    numbers = stored.numbers(torch.arange(len(batch.kv.k)))
    for written, scales, codes in (
        (batch.kv.k, stored.k_scales, numbers[0]),
        (batch.kv.v, stored.v_scales, numbers[1]),
    ):
        off = (codes - written.float()).abs().amax(-1) - scales.transpose(1, 2)
        if not bool((off <= 0).all()):
            return float("inf"), batch.tolerance
    q, table = batch.q.to(ops.device), batch.call.table.to(ops.device)
    found = attend(q, kv, table, batch.call.kv_lens, form, batch.scale)[..., : heads.size]
    return batch.with_numbers(*numbers).error(found), batch.tolerance
