"""A fused attention kernel in plain torch, right or with a fault that kernels have had."""

import torch
from torch import Tensor

from services.decoder.devices.npu.attention_call import AttentionCall
from services.decoder.steps.attention_meta import PagedKV

FAULTS = ("mask", "scale", "past 512", "last key", "window", "cumulative", "grouping")


def fused_attention(
    q: Tensor,
    kv: PagedKV,
    call: AttentionCall,
    scale: float,
    window: int | None = None,
    fault: str = "",
) -> Tensor:
    """Queries [T, num_q, size] of a call over a cache [blocks, block_size, num_kv, size]."""
    out = torch.zeros_like(q)
    start = used = 0
    for row, end in enumerate(call.ends):
        keys = call.kv_lens[row] - used if fault == "cumulative" else call.kv_lens[row]
        used = call.kv_lens[row]
        count = end - start
        k, v = (
            cache[call.table[row].long()].flatten(0, 1)[: max(keys, 1)] for cache in (kv.k, kv.v)
        )
        out[start:end] = _attend(
            q[start:end],
            k,
            v,
            _hidden(count, len(k), call.causal, window, fault),
            1.0 if fault == "scale" else scale,
            fault,
        )
        start = end
    return out


def _hidden(count: int, keys: int, causal: bool, window: int | None, fault: str) -> Tensor:
    places = torch.arange(keys)[None]
    last = torch.arange(keys - count, keys)[:, None]
    hidden = torch.zeros((count, keys), dtype=torch.bool)
    if causal and fault != "mask":
        hidden |= places > last
    if window is not None:
        hidden |= places <= last - window - int(fault == "window")
    if fault == "past 512":
        hidden |= places >= 512
    if fault == "last key" and keys > 1:
        hidden |= places == keys - 1
    return hidden & ~hidden.all(1, keepdim=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, fault: str) -> Tensor:
    share = q.shape[1] // k.shape[1]
    heads = torch.arange(q.shape[1])
    own = heads % k.shape[1] if fault == "grouping" else heads // share
    scores = torch.einsum("qhd,khd->hqk", q.float() * scale, k[:, own].float())
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v[:, own].float()).to(q.dtype)
