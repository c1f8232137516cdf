"""Attention on an Ascend 310P by NNAL's operators over a cache in tiles: one for steps of one token a row that see all
before it, another for all others, which is told by a mask what each query does not see."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.npu.attention_call import Send
from services.decoder.devices.npu.forms import Form
from services.decoder.steps.attention_meta import AttnMeta, PagedKV

NZ = 29  # the number of the format FRACTAL_NZ
TILE = 16  # elements
# op-plugin's tests keep lengths on the host, vllm-ascend keeps those of keys on the device.
FORMS = (Form("NZ"), Form("NZ-host"))


@dataclass(frozen=True)
class TiledCall:
    """A step as the operators want it. Lengths are int32 [n]; places int32 [T, filled up to a multiple of 16]."""

    keys: Tensor  # of each row, on the device
    keys_on_host: Tensor
    queries: Tensor  # of each row, on the host
    table: Tensor  # int32 [n, blocks]
    first: Tensor  # the place of each query
    last: Tensor  # the last place that it sees
    most: int  # keys of a row
    is_masked: bool  # whether some query does not see all keys of its row, without a window
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _tables: dict[int, Tensor] = field(default_factory=dict)

    def hidden(self, window: int | None) -> Tensor:
        """What queries do not see; see `hidden_keys`."""
        if window not in self._masks:
            self._masks[window] = hidden_keys(self.first, self.last, self.most, window)
        return self._masks[window]

    def blocks(self, parts: int) -> Tensor:
        """The table over a cache whose blocks are each divided into so many."""
        if parts not in self._tables:
            self._tables[parts] = divided(self.table, parts)
        return self._tables[parts]


def divided(blocks: Tensor, parts: int) -> Tensor:
    """Numbers of blocks [..., n] as those of their parts [..., n * parts]."""
    if parts == 1:
        return blocks
    within = torch.arange(parts, dtype=blocks.dtype, device=blocks.device)
    return (blocks[..., None] * parts + within).flatten(-2)


def tiled_call(meta: AttnMeta, send: Send) -> TiledCall:
    """send: a host array to the device, which it gets once."""
    ends = np.asarray(meta.kv_lens, np.int64)
    counts = np.asarray([end - start for start, end in pairwise(meta.cu_q)], np.int64)
    ends_on_host, queries = (torch.from_numpy(values).int() for values in (ends, counts))
    first = _positions(counts, ends)
    last = _seen_whole(first, meta)
    # Rows that fill a tile up see the last key, and all without a window: one that sees nothing would have no softmax.
    blank = np.full(-len(first) % TILE, meta.max_kv - 1, np.int64)
    sent = send(np.concatenate([ends, first, blank, last, blank])).int()
    keys, first_sent, last_sent = sent.split(
        [len(ends), len(first) + len(blank), len(last) + len(blank)]
    )
    return TiledCall(
        keys,
        ends_on_host,
        queries,
        meta.block_table,
        first_sent,
        last_sent,
        meta.max_kv,
        meta.max_q > 1,
    )


def _seen_whole(
    positions: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", meta: AttnMeta
) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """The last place that each query sees: its own, or the end of the span that it is in."""
    found = positions.copy()
    for row, low, high in meta.bidirectional or ():
        own = slice(meta.cu_q[row], meta.cu_q[row + 1])
        inside = (positions[own] >= low) & (positions[own] < high)
        found[own][inside] = min(high, meta.kv_lens[row]) - 1
    return found


def hidden_keys(first: Tensor, last: Tensor, keys: int, window: int | None = None) -> Tensor:
    """The mask of queries at the places `first`, which see keys up to the place `last`, both int32 [T, a multiple of
    16], over as many keys: a row for each query, float16, 0 where it sees a key and minus infinity elsewhere, in tiles
    [1, keys / 16, T, 16] (FRACTAL_NZ). window: keys that a query sees up to its own, itself included.

    So vllm-ascend makes it (`get_splitfuse_mask` and `nd_to_nz_spec`), and so, in rows, op-plugin's test of the
    operator (`test_atb_paged_attention_splitfuse.py`), both without windows.
    """
    places = torch.arange(-(-keys // TILE) * TILE, dtype=torch.int32, device=first.device)
    places = places.view(-1, 1, TILE)
    hidden = places > last[None, :, None]
    if window is not None:
        hidden = hidden | (places <= first[None, :, None] - window)
    mask = torch.zeros(hidden.shape, dtype=torch.float16, device=first.device)
    mask.masked_fill_(hidden, float("-inf"))
    tiled: Tensor = torch_npu.npu_format_cast(mask[None], NZ)
    return tiled


def attend(
    q: Tensor,
    kv: PagedKV,
    call: TiledCall,
    form: Form,
    heads: Sequence[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of queries [T, num_q, P] over a cache in tiles: [T, num_q, P]. heads: of queries, of keys, and into how
    many parts blocks are divided there."""
    num_q, num_kv, parts = heads
    out, table = torch.empty_like(q), call.blocks(parts)
    if not call.is_masked and window is None:
        torch_npu._npu_paged_attention(q, kv.k, kv.v, num_kv, num_q, scale, table, call.keys, out)
        return out
    keys = call.keys if form == FORMS[0] else call.keys_on_host
    torch_npu._npu_paged_attention_splitfuse(
        q, kv.k, kv.v, table, keys, call.hidden(window), call.queries, num_kv, num_q, scale, out
    )
    return out


def _positions(
    counts: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
    ends: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """Of each query in its sequence."""
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(counts.sum()) + np.repeat(ends - counts - before, counts))
