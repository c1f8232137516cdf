"""The attention kernels of ATB, which 310P takes: their output is an argument, their lengths are tensors."""

import torch
from torch import Tensor

from tests.ascend.simulator.dispatch import kernel
from tests.ascend.simulator.errors import require
from tests.ascend.simulator.kernels.attention import attend, attend_last, causal, gather
from tests.ascend.simulator.kernels.kv_cache import NZ_WIDTH
from tests.ascend.simulator.kernels.layer import require_contiguous
from tests.ascend.simulator.memory import was_on_device
from tests.ascend.simulator.personality import personality

_BLOCKS, _LARGEST_BLOCK = (64, 128), 16384


def _lengths(name: str, tensor: Tensor) -> list[int]:
    require(
        tensor.dtype == torch.int32 and tensor.dim() == 1,
        f"{name}: lengths {tensor.dtype} {list(tensor.shape)}",
    )
    return [int(length) for length in tensor.tolist()]


def _check_table(name: str, table: Tensor, rows: int) -> None:
    require(
        table.dtype == torch.int32 and len(table) == rows,
        f"{name}: block_table {list(table.shape)}, {rows} rows",
    )


def _check_blocks(name: str, cache: Tensor, num_kv_heads: int) -> None:
    """Of a 310P: what vllm-ascend found that a block may have."""
    if not personality().is_310p:
        return
    tiles, size = cache.shape[1:3]
    width = tiles * NZ_WIDTH // num_kv_heads
    require(
        size in _BLOCKS and width * size <= _LARGEST_BLOCK, f"{name}: a cache {list(cache.shape)}"
    )


@kernel("atb", "_npu_paged_attention")
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    workspace: Tensor | None = None,
) -> None:
    name = "_npu_paged_attention"
    require_contiguous(name, key_cache=key_cache, value_cache=value_cache, out=out)
    _check_blocks(name, key_cache, num_kv_heads)
    lengths = _lengths(name, context_lens)
    require(
        len(lengths) == len(query),
        f"{name}: {len(lengths)} lengths for {len(query)} queries of one token",
    )
    require(query.shape[1] == num_heads, f"{name}: queries {list(query.shape)}, {num_heads} heads")
    _check_table(name, block_table, len(query))
    out.copy_(
        attend_last(
            query, (key_cache, value_cache), block_table, lengths, num_kv_heads, scale_value
        )
    )


def _mask_rows(name: str, mask: Tensor) -> Tensor:
    """A row for each query of the whole call, with what is added to its scores: rows themselves, or on a 310P tiles
    [1, keys / 16, queries, 16]."""
    if not personality().is_310p:
        require(mask.dim() == 2, f"{name}: a mask {list(mask.shape)}")
        return mask
    require(
        mask.dim() == 4 and len(mask) == 1 and mask.shape[-1] == NZ_WIDTH,
        f"{name}: a mask {list(mask.shape)} is not in tiles",
    )
    require(mask.shape[2] % NZ_WIDTH == 0, f"{name}: a mask {list(mask.shape)}")
    return mask[0].permute(1, 0, 2).reshape(mask.shape[2], -1)


@kernel("atb", "_npu_paged_attention_splitfuse")
def paged_attention_splitfuse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
) -> None:
    name = "_npu_paged_attention_splitfuse"
    require_contiguous(name, key_cache=key_cache, value_cache=value_cache, out=out)
    _check_blocks(name, key_cache, num_kv_heads)
    require(mask.dtype == query.dtype, f"{name}: a mask of {mask.dtype}")
    require(not was_on_device(seq_len), f"{name}: qLensTensor: hostData is null")
    wanted = personality().is_310p
    require(
        was_on_device(context_lens) == wanted,
        f"{name}: contextLens on the {'host' if wanted else 'device'}: hostData",
    )
    queries, keys = _lengths(name, seq_len), _lengths(name, context_lens)
    rows = _mask_rows(name, mask)
    require(
        len(rows) >= len(query) and rows.shape[1] >= max(keys),
        f"{name}: a mask {list(mask.shape)} of {len(query)} queries and {max(keys)} keys",
    )
    require(
        len(queries) == len(keys) and sum(queries) == len(query),
        f"{name}: {queries} of {len(query)} queries",
    )
    require(query.shape[1] == num_heads, f"{name}: queries {list(query.shape)}, {num_heads} heads")
    _check_table(name, block_table, len(queries))
    begin = 0
    for row, (count, length) in enumerate(zip(queries, keys, strict=True)):
        key, value = (
            gather(cache, block_table[row : row + 1], length, num_kv_heads)
            for cache in (key_cache, value_cache)
        )
        part = slice(begin, begin + count)
        added = rows[None, part, :length]
        out[part] = attend(query[None, part], key, value, None, scale_value, added=added)[0]
        begin += count


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scale: float,
    out: Tensor,
    masked: bool,
) -> None:
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        hidden = causal(length, length) if masked else None
        out[part] = attend(query[None, part], key[None, part], value[None, part], hidden, scale)[0]
        begin += length


@kernel("atb", "_npu_flash_attention")
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    name = "_npu_flash_attention"
    lengths = _lengths(name, seq_len)
    require(sum(lengths) == len(query), f"{name}: lengths {lengths} of {len(query)} queries")
    require(bool(mask[0, 1]) and not bool(mask[1, 0]), f"{name}: a mask that hides the past")
    _packed(query, key, value, lengths, scale_value, out, masked=True)


@kernel("atb", "_npu_flash_attention_unpad")
def flash_attention_unpad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    name = "_npu_flash_attention_unpad"
    require_contiguous(name, out=out)
    lengths = _lengths(name, seq_len)
    require(sum(lengths) == len(query), f"{name}: lengths {lengths} of {len(query)} queries")
    _packed(query, key, value, lengths, scale_value, out, masked=False)
