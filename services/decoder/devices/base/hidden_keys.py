"""What a query does not see of its sequence."""

import torch
from torch import Tensor

from services.decoder.steps.attention_meta import AttnMeta


def hidden_keys(
    meta: AttnMeta,
    row: int,
    window: int | None,
    chunk: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Which keys each query of a row must not see: bool [queries, keys], made on the host unless a device is given.
    Spans that see each other whole do so inside the window alone."""
    count = meta.cu_q[row + 1] - meta.cu_q[row]
    length = meta.kv_lens[row]
    queries = torch.arange(length - count, length, device=device)[:, None]
    keys = torch.arange(length, device=device)[None, :]
    hidden = keys > queries
    for other, start, end in meta.bidirectional or ():
        if other == row:
            inside = (queries >= start) & (queries < end) & (keys >= start) & (keys < end)
            hidden &= ~inside
    if window is not None:
        hidden |= keys <= queries - window
    if chunk is not None:
        hidden |= keys // chunk != queries // chunk
    return hidden
