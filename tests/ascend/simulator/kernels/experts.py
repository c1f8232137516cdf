"""Experts: choosing them, bringing tokens in their order, products with the weights of each, and sums of a token's."""

import torch
from torch import Tensor

from tests.ascend.simulator.dispatch import kernel
from tests.ascend.simulator.errors import require
from tests.ascend.simulator.kernels.layer import require_contiguous
from tests.ascend.simulator.personality import personality

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MOST_CHOSEN, _MOST_SUMMED = 1024, 512
_MOST_EXPERTS, _MOST_GROUPS, _INNER_LIMIT = 10240, 1024, 65536
_TILE = 16


@kernel("npu", "npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu_moe_gating_top_k_softmax"
    require(x.dtype in _FLOATS and x.dim() in (2, 3), f"{name}: {x.dtype} {list(x.shape)}")
    require(0 < k <= min(x.shape[-1], _MOST_CHOSEN), f"{name}: {k} of {x.shape[-1]}")
    require(finished is None, f"{name}: finished is not simulated")
    require_contiguous(name, x=x)
    shares, index = x.float().softmax(-1).topk(k)
    rows = index.numel() // k
    order = torch.arange(rows * k, dtype=torch.int32).view(k, rows).T.reshape(index.shape)
    return shares.to(x.dtype), index.int(), order.contiguous()


@kernel("npu", "npu_moe_init_routing_v2")
def init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | tuple[int, ...] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    name = "npu_moe_init_routing_v2"
    others = (scale, offset, x_dtype)
    require(all(other is None for other in others), f"{name}: not simulated")
    require(quant_mode == -1 and drop_pad_mode == 0, f"{name}: mode {quant_mode}, {drop_pad_mode}")
    require(x.dim() == 2 and x.dtype in _FLOATS, f"{name}: x {x.dtype} {list(x.shape)}")
    require(
        expert_idx.dim() == 2 and len(expert_idx) == len(x) and expert_idx.dtype == torch.int32,
        f"{name}: expert_idx {expert_idx.dtype} {list(expert_idx.shape)}",
    )
    require_contiguous(name, x=x, expert_idx=expert_idx)
    require(0 < expert_num <= _MOST_EXPERTS, f"{name}: {expert_num} experts")
    require(bool((expert_idx >= 0).all()), f"{name}: an index below 0")
    require(int(expert_idx.max()) < expert_num, f"{name}: an index of {int(expert_idx.max())}")
    whole = list(active_expert_range) in ([], [0, expert_num])
    require(whole, f"{name}: a range {active_expert_range} is not simulated")
    require(expert_tokens_num_type in (0, 1), f"{name}: keys and values are not simulated")
    flat = expert_idx.flatten().long()
    order = flat.sort(stable=True).indices
    counts = flat.bincount(minlength=expert_num)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    rows = x[order // expert_idx.shape[1]]
    kept = rows if active_num <= 0 else rows[:active_num]
    sums = personality().is_310p or expert_tokens_num_type == 0
    said = counts.cumsum(0) if sums else counts
    if not expert_tokens_num_flag and not personality().is_310p:
        said = torch.full_like(said, -1)
    last = counts.int() if personality().is_310p else torch.full((len(x),), float("nan"))
    return kept, (order if row_idx_type else places).int(), said, last


@kernel("npu", "npu_grouped_matmul")
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **others: object,
) -> list[Tensor]:
    name = "npu_grouped_matmul"
    given = [key for key, value in others.items() if value is not None]
    require(not given, f"{name}: {given} is not simulated")
    require(len(x) == len(weight) == 1, f"{name}: several tensors are not simulated")
    rows, stacked = x[0], weight[0]
    require(
        split_item in (2, 3) and group_type == 0 and not act_type,
        f"{name}: split_item {split_item}, group_type {group_type}",
    )
    require(rows.dim() == 2 and stacked.dim() == 3, f"{name}: {rows.dim()} and {stacked.dim()}-D")
    require_contiguous(name, x=rows)
    count, inputs, out = stacked.shape
    require(rows.shape[1] == inputs, f"{name}: {list(rows.shape)} x {list(stacked.shape)}")
    require(max(inputs, out) < _INNER_LIMIT, f"{name}: {list(stacked.shape)}")
    require(rows.dtype == stacked.dtype and rows.dtype in _FLOATS, f"{name}: {rows.dtype}")
    if personality().is_310p:
        require(rows.dtype == torch.float16 and out % _TILE == 0, f"{name}: {rows.dtype}, n {out}")
    ends = _ends(name, group_list, group_list_type, count, len(rows))
    added = None if bias is None else bias[0]
    if added is not None:
        wanted = torch.float32 if rows.dtype == torch.bfloat16 else rows.dtype
        require(
            added.dtype == wanted and list(added.shape) == [count, out],
            f"{name}: bias {added.dtype} {list(added.shape)} for {rows.dtype}",
        )
    found, first = torch.empty((len(rows), out), dtype=rows.dtype), 0
    for group, end in enumerate(ends):
        product = rows[first:end].float() @ stacked[group].float()
        found[first:end] = (product if added is None else product + added[group].float()).to(
            rows.dtype
        )
        first = end
    return [found]


def _ends(name: str, groups: Tensor | None, kind: int | None, count: int, rows: int) -> list[int]:
    require(groups is not None and groups.dtype == torch.int64, f"{name}: group_list is int64")
    assert groups is not None
    require(list(groups.shape) == [count], f"{name}: group_list {list(groups.shape)} of {count}")
    require(count <= _MOST_GROUPS, f"{name}: {count} groups")
    require(kind in (0, 1), f"{name}: group_list_type {kind}")
    require(not (kind == 1 and count == 1), f"{name}: one group by its size")
    ends = groups.cumsum(0) if kind == 1 else groups
    found: list[int] = ends.tolist()
    ordered = all(one <= other for one, other in zip([0, *found], found, strict=False))
    require(ordered, f"{name}: group_list {found}")
    require(found[-1] == rows, f"{name}: groups of {found[-1]} rows, and {rows} of x")
    return found


@kernel("npu", "npu_moe_token_unpermute")
def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    name = "npu_moe_token_unpermute"
    require(not padded_mode and probs is not None, f"{name}: this mode is not simulated")
    assert probs is not None
    require(sorted_indices.dtype == torch.int32, f"{name}: indices {sorted_indices.dtype}")
    require(probs.dtype == permuted_tokens.dtype, f"{name}: probs {probs.dtype}")
    require(
        probs.dim() == 2
        and probs.shape[1] <= _MOST_SUMMED
        and list(sorted_indices.shape) == [probs.numel()] == [len(permuted_tokens)],
        f"{name}: {list(permuted_tokens.shape)}, {list(sorted_indices.shape)}, {list(probs.shape)}",
    )
    require_contiguous(name, permuted_tokens=permuted_tokens, sorted_indices=sorted_indices)
    return _summed(permuted_tokens, sorted_indices, probs)


@kernel("npu", "_npu_moe_token_unpermute")
def token_unpermute_of_autograd(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """What torch_npu calls outside of `torch.inference_mode`."""
    return (
        token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape),
        permuted_tokens,
    )


@kernel("npu", "npu_moe_finalize_routing")
def finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    name = "npu_moe_finalize_routing"
    others = (skip1, skip2, bias, export_for_source_row)
    require(all(other is None for other in others), f"{name}: not simulated")
    require(scales is not None, f"{name}: without scales it is not simulated")
    assert scales is not None
    rows, places = expanded_permuted_rows, expanded_src_to_dst_row
    require(rows.dtype == scales.dtype and rows.dtype in _FLOATS, f"{name}: {scales.dtype}")
    require(places.dtype == torch.int32, f"{name}: indices {places.dtype}")
    require(
        list(places.shape) == [scales.numel()] == [len(rows)],
        f"{name}: {list(rows.shape)}, {list(places.shape)}, {list(scales.shape)}",
    )
    require(drop_pad_mode in (0, 2), f"{name}: mode {drop_pad_mode} is not simulated")
    if drop_pad_mode == 0:  # by columns
        places = places.view(scales.shape[1], scales.shape[0]).T.flatten()
    return _summed(rows, places, scales)


def _summed(rows: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    each = rows.float()[places.long()].view(*shares.shape, -1)
    return (each * shares.float()[..., None]).sum(1).to(rows.dtype)
