"""`npu_fusion_attention`, the kernel of training, which torch's scaled_dot_product_attention takes on 910B."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.ascend.simulator.dispatch import kernel
from tests.ascend.simulator.errors import require
from tests.ascend.simulator.kernels.attention import attend, band

_LEFT_UP_CAUSAL = 2


def _hidden(mask: Tensor | None, sparse_mode: int, queries: int, keys: int) -> Tensor | None:
    if sparse_mode == _LEFT_UP_CAUSAL:
        return band(queries, keys, keys, keys - queries)
    require(
        sparse_mode in (0, 1), f"npu_fusion_attention: sparse_mode {sparse_mode} is not simulated"
    )
    if mask is None:
        return None
    require(
        tuple(mask.shape[-2:]) == (queries, keys), f"npu_fusion_attention: mask {list(mask.shape)}"
    )
    require(
        mask.dtype in (torch.bool, torch.uint8), f"npu_fusion_attention: a mask of {mask.dtype}"
    )
    return mask.bool().reshape(-1, queries, keys)


def _batched(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, mode: int
) -> Tensor:
    """Of [B, H, S, D]."""
    hidden = _hidden(mask, mode, query.shape[2], key.shape[2])
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    return attend(q, k, v, hidden, scale).transpose(1, 2).contiguous()


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Sequence[int],
    kv_ends: Sequence[int],
    scale: float,
) -> Tensor:
    """Of [T, H, D]: each sequence sees itself, wholly."""
    out = torch.zeros_like(query)
    rows = zip(pairwise([0, *ends]), pairwise([0, *kv_ends]), strict=True)
    for (a, b), (c, d) in rows:
        out[a:b] = attend(query[None, a:b], key[None, c:d], value[None, c:d], None, scale)[0]
    return out


def _fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | Tensor | None = None,
    actual_seq_kvlen: Sequence[int] | Tensor | None = None,
    sparse_mode: int = 0,
    *rest: Any,
    **options: Any,
) -> Tensor:
    name = "npu_fusion_attention"
    require(pse is None and padding_mask is None and keep_prob == 1.0, f"{name}: not simulated")
    if input_layout == "BNSD":
        return _batched(query, key, value, atten_mask, scale, sparse_mode)
    require(
        input_layout == "TND" and atten_mask is None,
        f"{name}: layout {input_layout} with a mask is not simulated",
    )
    require(
        actual_seq_qlen is not None and actual_seq_kvlen is not None, f"{name}: TND takes lengths"
    )
    ends, kv_ends = (
        [int(n) for n in lengths or ()] for lengths in (actual_seq_qlen, actual_seq_kvlen)
    )
    return _packed(query, key, value, ends, kv_ends, scale)


@kernel("npu", "npu_fusion_attention")
def fusion_attention(
    *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    out = _fusion_attention(*arguments, **options)
    return out, torch.zeros(1), torch.zeros(1), torch.zeros(1), 0, 0, 0


@kernel("npu", "npu_fusion_attention_v3")
def fusion_attention_v3(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    return _fusion_attention(*arguments, **options), *(torch.zeros(1) for _ in range(5))
