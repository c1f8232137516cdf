"""The arithmetic of attention in float32, which all attention kernels share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.ascend.simulator.errors import require
from tests.ascend.simulator.kernels.kv_cache import NZ_WIDTH, is_nz


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Attention of a batch of sequences.

    query [B, S, Hq, D], key [B, N, Hkv, D], value [B, N, Hkv, Dv]; hidden [B or 1, S, N] is true where a query does not
    see a key; sinks [Hq] take part in the softmax and have no value; added [B or 1, S, N] is added to the scores.
    Returns [B, S, Hq, Dv].
    """
    batch, length, heads, size = query.shape
    kv_heads = key.shape[2]
    groups = heads // kv_heads
    grouped = query.float().view(batch, length, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
    keys = key.float().permute(0, 2, 3, 1).unsqueeze(2)
    scores = torch.matmul(grouped, keys).mul_(scale)  # [B, Hkv, G, S, N]
    if hidden is not None:
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
    if added is not None:
        scores.add_(added[:, None, None].float())
    weights = _softmax(scores, sinks)
    values = value.float().permute(0, 2, 1, 3).unsqueeze(2)
    mixed = torch.matmul(weights, values).permute(0, 3, 1, 2, 4)
    return mixed.reshape(batch, length, heads, -1).to(query.dtype)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(1, scores.shape[1], scores.shape[2], 1, 1)
    column = column.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def gather(cache: Tensor, table: Tensor, length: int, kv_heads: int) -> Tensor:
    """The first `length` rows of each sequence: [B, length, Hkv, D] for a table [B, width]."""
    nz = is_nz(cache)
    size = cache.shape[2] if nz else cache.shape[1]
    width = -(-length // size)
    require(
        table.shape[1] >= width, f"block_table {list(table.shape)} is too short for {length} keys"
    )
    blocks = table[:, :width].long()
    require(
        bool(((blocks >= 0) & (blocks < len(cache))).all()),
        "a block of block_table is out of range",
    )
    found = cache[blocks]
    if nz:
        found = found.permute(0, 1, 3, 2, 4)
        require(found.shape[-1] == NZ_WIDTH, "an NZ cache ends in 16")
    return found.reshape(len(table), width * size, kv_heads, -1)[:, :length]


def attend_last(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    table: Tensor,
    lengths: Sequence[int],
    kv_heads: int,
    scale: float,
    sinks: Tensor | None = None,
    before: int | None = None,
) -> Tensor:
    """Attention of the last position of each sequence, all at once: query and result [B, Hq, D].

    A query sees its sequence's keys, or itself and `before` keys before it.
    """
    longest, ends = max(lengths), torch.tensor(lengths)[:, None]
    size = caches[0].shape[2] if is_nz(caches[0]) else caches[0].shape[1]
    # Blocks past the end of a sequence may be anything: they are hidden, so its first one stands for them.
    used = torch.arange(table.shape[1])[None] * size < ends
    table = torch.where(used, table, table[:, :1])
    position = torch.arange(longest)[None]
    past = position >= ends
    # What lies past the end may be NaN, which a weight of 0 does not hide.
    blank = past[:, :, None, None]
    key, value = (gather(cache, table, longest, kv_heads).masked_fill(blank, 0) for cache in caches)
    hidden = past if before is None else past | (position < ends - 1 - before)
    return attend(query[:, None], key, value, hidden[:, None], scale, sinks)[:, 0]


def causal(queries: int, keys: int) -> Tensor:
    """Hidden keys [1, S, N] of the last `queries` of `keys` positions."""
    return band(queries, keys, keys, 0)


def band(queries: int, keys: int, before: int, after: int) -> Tensor:
    """Hidden keys [1, S, N]: all but `before` keys before a query, itself, and `after` keys after it."""
    position = torch.arange(keys - queries, keys)[:, None]
    distance = torch.arange(keys)[None] - position
    return ((distance > after) | (distance < -before))[None]
