"""Attention on an Ascend 310P by NNAL's operators over a cache in tiles: one for steps of one token a row, another for
all others, which is told by a mask what each query does not see."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """A step as the operators want it. Lengths are int32 [n]."""

    keys: Tensor  # of each row, on the device
    keys_on_host: Tensor
    queries: Tensor  # of each row, on the host
    hidden: Tensor | None  # see `hidden_keys`; None where each row has one token


def tiled_call(meta: AttnMeta, send: Send) -> TiledCall:
    """send: a host array to the device, which it gets once."""
    ends = np.asarray(meta.kv_lens, np.int64)
    counts = np.asarray([end - start for start, end in pairwise(meta.cu_q)], np.int64)
    ends_on_host, queries = (torch.from_numpy(values).int() for values in (ends, counts))
    if meta.max_q == 1:
        return TiledCall(send(ends).int(), ends_on_host, queries, None)
    positions = _positions(counts, ends)
    # Rows that fill a tile up see everything: one that sees nothing would have no softmax.
    blank = np.full(-len(positions) % TILE, meta.max_kv, np.int64)
    sent = send(np.concatenate([ends, positions, blank])).int()
    keys, places = sent[: len(ends)], sent[len(ends) :]
    return TiledCall(keys, ends_on_host, queries, hidden_keys(places, meta.max_kv))


def hidden_keys(positions: Tensor, keys: int) -> Tensor:
    """The mask of queries at positions int32 [T], a multiple of 16, over as many keys: a row for each query, float16,
    0 where it sees a key and minus infinity behind itself, in tiles [1, keys / 16, T, 16] (FRACTAL_NZ).

    So vllm-ascend makes it (`get_splitfuse_mask` and `nd_to_nz_spec`), and so, in rows, op-plugin's test of the
    operator (`test_atb_paged_attention_splitfuse.py`).
    """
    places = torch.arange(-(-keys // TILE) * TILE, dtype=torch.int32, device=positions.device)
    hidden = places.view(-1, 1, TILE) > positions[None, :, None]
    mask = torch.zeros(hidden.shape, dtype=torch.float16, device=positions.device)
    mask.masked_fill_(hidden, float("-inf"))
    tiled: Tensor = torch_npu.npu_format_cast(mask[None], NZ)
    return tiled


def attend(
    q: Tensor,
    kv: PagedKV,
    table: Tensor,
    call: TiledCall,
    form: Form,
    heads: Sequence[int],
    scale: float,
) -> Tensor:
    """Causal attention of queries [T, num_q, P] over a cache in tiles: [T, num_q, P]. heads: of queries, of keys."""
    num_q, num_kv = heads
    out = torch.empty_like(q)
    if call.hidden is None:
        torch_npu._npu_paged_attention(q, kv.k, kv.v, num_kv, num_q, scale, table, call.keys, out)
        return out
    keys = call.keys if form == FORMS[0] else call.keys_on_host
    torch_npu._npu_paged_attention_splitfuse(
        q, kv.k, kv.v, table, keys, call.hidden, call.queries, num_kv, num_q, scale, out
    )
    return out


def _positions(
    counts: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
    ends: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """Of each query in its sequence."""
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(counts.sum()) + np.repeat(ends - counts - before, counts))
