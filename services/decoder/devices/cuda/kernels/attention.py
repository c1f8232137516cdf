"""Attention of a step's rows to their blocks of the cache: all rows in one call, prompts and single tokens alike, with
sums of a softmax that goes on from keys to keys (Milakov and Gimelshein, 2018; Dao et al., 2022)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.decoder.steps.attention_meta import AttnMeta, PagedKV

_MOST_SHARED = 64  # query heads to one head of keys
_ROWS_OF_PROMPTS = 64  # queries, times the heads that share keys, of a program
_LEAST_ROWS = 16
_LARGEST = 256  # elements of a head
_KEYS = 64  # of a step of a program
_WIDE = 256  # bytes of a key beyond which there are half as many
# Programs that a device has at once, about: keys are divided until there are as many.
_PROGRAMS = 264
_LEAST_KEYS = 128  # of a part
_MOST_PARTS = 32
_LOG2E = 1.4426950408889634

_SEEN: set[object] = set()  # kinds of layers


def takes(q: Tensor, kv: PagedKV) -> bool:
    """Whether these can be heads here: q [T, num_q, D]."""
    within = (
        q.shape[1] <= _MOST_SHARED * kv.k.shape[2] and max(kv.k.shape[3], kv.v.shape[3]) <= _LARGEST
    )
    return within and q.stride(2) == 1


def attend(
    q: Tensor, kv: PagedKV, meta: AttnMeta, out: Tensor, scale: float, window: int | None
) -> None:
    """Fills `out` [T, num_q, D of v] for queries q [T, num_q, D] and caches [blocks, block_size, num_kv, D], where the
    meta has its `starts` and `lengths` on the device, int64 [rows + 1] and [rows]."""
    call = _Call(q, kv, meta, out, scale, window)
    if meta.num_decodes:
        call.attend(0, meta.num_decodes, 1)
    if meta.n > meta.num_decodes:
        call.attend(meta.num_decodes, meta.n, meta.max_q)


@dataclass(frozen=True)
class _Call:
    """What `attend` is given."""

    q: Tensor
    kv: PagedKV
    meta: AttnMeta
    out: Tensor
    scale: float
    window: int | None

    @property
    def shared(self) -> int:
        """Heads of queries to one of keys."""
        return self.q.shape[1] // self.kv.k.shape[2]

    def attend(self, first: int, last: int, longest: int) -> None:
        """Of rows `first` to `last`, none of which has more tokens than `longest`. When such a layer is seen for the
        first time, which is at the start, all that other steps may need is compiled."""
        tile = self._tile(longest)
        tiles = triton.cdiv(longest, self._queries(tile))
        programs = tiles * (last - first) * self.kv.k.shape[2]
        kind = (
            *self.q.shape[1:],
            self.q.dtype,
            *self.kv.k.shape[1:],
            self.out.shape[2],
            self.window,
        )
        if kind not in _SEEN:
            _SEEN.add(kind)
            for some in {self._tile(1), self._tile(_ROWS_OF_PROMPTS)}:
                for parts in (1, 2):
                    self._launch(first, first + 1, some, 1, parts)
        self._launch(first, last, tile, tiles, _parts(programs, max(self.meta.kv_lens[first:last])))

    def _tile(self, longest: int) -> int:
        least = _LEAST_ROWS if longest * self.shared <= _LEAST_ROWS else _ROWS_OF_PROMPTS
        return int(max(least, triton.next_power_of_2(self.shared)))

    def _queries(self, tile: int) -> int:
        return tile // self.shared

    def _launch(self, first: int, last: int, tile: int, tiles: int, parts: int) -> None:
        cu_q, k, v = self.meta.cu_q, self.kv.k, self.kv.v
        own = slice(cu_q[first], cu_q[last])
        q, out = self.q[own], self.out[own]
        size, size_v = q.shape[2], out.shape[2]
        table = self.meta.block_table
        mixed = weights = out
        if parts > 1:
            mixed = out.new_empty((parts, *out.shape), dtype=torch.float32)
            weights = out.new_empty((parts, *out.shape[:2], 2), dtype=torch.float32)
        _attend[(tiles * parts, last - first, k.shape[2])](
            q,
            k,
            v,
            mixed,
            weights,
            table,
            self.meta.device_state["starts"],
            self.meta.device_state["lengths"],
            first,
            own.start,
            self.scale * _LOG2E,
            self.window or 0,
            parts,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.numel(),
            *k.stride()[:3],
            *v.stride()[:3],
            table.stride(0),
            BLOCK=k.shape[1],
            SHARED=self.shared,
            QUERIES=self._queries(tile),
            IN_PARTS=parts > 1,
            HAS_WINDOW=self.window is not None,
            SIZE=size,
            SIZE_V=size_v,
            WIDTH=max(16, triton.next_power_of_2(size)),
            WIDTH_V=max(16, triton.next_power_of_2(size_v)),
            TILE=tile,
            KEYS=_KEYS if size * q.element_size() <= _WIDE else _KEYS // 2,
            num_warps=4,
            num_stages=2,
        )
        if parts > 1:
            _combine[(out.shape[0] * out.shape[1],)](
                mixed,
                weights,
                out,
                parts,
                out.numel(),
                MOST_PARTS=_MOST_PARTS,
                SIZE_V=size_v,
                WIDTH_V=triton.next_power_of_2(size_v),
                num_warps=2,
            )


def _parts(programs: int, keys: int) -> int:
    found: int = min(_MOST_PARTS, _PROGRAMS // max(1, programs), triton.cdiv(keys, _LEAST_KEYS))
    return max(1, found)


@triton.jit(do_not_specialize=["first_row", "before", "table_row", "window", "parts", "elements"])
def _attend(
    q,
    k,
    v,
    out,
    weights,
    table,
    starts,
    lengths,
    first_row,
    before,
    scale,
    window,
    parts,
    q_token,
    q_head,
    out_token,
    elements,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    table_row,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,
    IN_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_V: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Some queries of a row, with all heads that share one head of keys, and a part of the keys. before: tokens of the
    step that are not in q and out; elements: of what each part gives."""
    row, kv_head = first_row + tl.program_id(1), tl.program_id(2)
    part = tl.program_id(0) % parts
    first_query = tl.program_id(0) // parts * QUERIES
    first = tl.load(starts + row).to(tl.int32)
    count = tl.load(starts + row + 1).to(tl.int32) - first
    if first_query >= count:
        return
    length = tl.load(lengths + row).to(tl.int32)
    element = tl.arange(0, TILE)
    query = first_query + element // SHARED
    valid = (query < count) & (element < QUERIES * SHARED)
    head = kv_head * SHARED + element % SHARED
    token = (first - before + query).to(tl.int64)
    position = length - count + query
    end = tl.minimum(length, length - count + first_query + QUERIES)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, length - count + first_query - window + 1) // KEYS * KEYS
    if IN_PARTS:
        each = tl.cdiv(tl.cdiv(end - begin, KEYS), parts) * KEYS
        begin += part * each
        end = tl.minimum(end, begin + each)
    width, width_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    left = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + width[None, :],
        mask=valid[:, None] & (width < SIZE)[None, :],
        other=0.0,
    )
    top = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE,), dtype=tl.float32)
    mixed = tl.zeros((TILE, WIDTH_V), dtype=tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < end
        block = tl.load(
            table + row.to(tl.int64) * table_row + key // BLOCK, mask=there, other=0
        ).to(tl.int64)
        right = tl.load(
            k
            + (block * k_block + key % BLOCK * k_token + kv_head * k_head)[None, :]
            + width[:, None],
            mask=there[None, :] & (width < SIZE)[:, None],
            other=0.0,
        )
        scores = tl.dot(left, right, input_precision="ieee") * scale
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # Where nothing has been seen so far.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        values = tl.load(
            v
            + (block * v_block + key % BLOCK * v_token + kv_head * v_head)[:, None]
            + width_v[None, :],
            mask=there[:, None] & (width_v < SIZE_V)[None, :],
            other=0.0,
        )
        total = total * fade + tl.sum(shares, 1)
        mixed = mixed * fade[:, None]
        mixed = tl.dot(shares.to(values.dtype), values, mixed, input_precision="ieee")
        top = higher
    inside = valid[:, None] & (width_v < SIZE_V)[None, :]
    place = token * out_token + head * SIZE_V
    if IN_PARTS:
        place += part.to(tl.int64) * elements
        of_part = (
            part.to(tl.int64) * (elements // SIZE_V) + token * (out_token // SIZE_V) + head
        ) * 2
        tl.store(weights + of_part, top, mask=valid)
        tl.store(weights + of_part + 1, total, mask=valid)
    else:
        # A row without keys, and the padding of a tile, give zeros.
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place[:, None] + width_v[None, :], mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts", "elements"])
def _combine(
    mixed,
    weights,
    out,
    parts,
    elements,
    MOST_PARTS: tl.constexpr,
    SIZE_V: tl.constexpr,
    WIDTH_V: tl.constexpr,
):
    """One head of one token, of all parts of its keys, each of so many elements."""
    place = tl.program_id(0).to(tl.int64)
    part, width = tl.arange(0, MOST_PARTS), tl.arange(0, WIDTH_V)
    given = part < parts
    of_part = weights + (part.to(tl.int64) * (elements // SIZE_V) + place) * 2
    top = tl.load(of_part, mask=given, other=float("-inf"))
    total = tl.load(of_part + 1, mask=given, other=0.0)
    highest = tl.max(top, 0)
    share = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    values = tl.load(
        mixed + part.to(tl.int64)[:, None] * elements + place * SIZE_V + width[None, :],
        mask=given[:, None] & (width < SIZE_V)[None, :],
        other=0.0,
    )
    whole = tl.sum(total * share, 0)
    found = tl.sum(values * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + place * SIZE_V + width, found.to(out.dtype.element_ty), mask=width < SIZE_V)
