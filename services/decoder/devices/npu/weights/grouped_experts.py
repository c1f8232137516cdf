"""All experts of a layer by a few operators: tokens are brought in the order of their experts, multiplied with each
one's weights in one call a layer, and brought back as sums."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.base.experts import ExpertLayer, PackedExperts
from services.decoder.devices.npu.attention.tiled_attention import NZ
from services.decoder.devices.npu.forms import Form, Grouping, Routing
from services.decoder.devices.npu.schemas import supports
from shared.weights.linear_weight import LinearWeight

# Of vllm-ascend, which has met wrong results of `npu_moe_finalize_routing`, and of op-plugin's documents.
UNPERMUTE, FINALIZE = Form("grouped"), Form("grouped_finalize")
# With weights as the matrix unit reads them, which vllm-ascend has on a 310P alone.
TILED = Form("grouped_nz")
CHOOSING = Form("gating_softmax")
_MOST_CHOSEN = 1024
_MOST_GROUPS = 1024
_LARGEST_SIDE = 65535  # elements of a row of the weights
_COUNTS, _ENDS = (
    1,
    0,
)  # what the operators take as sizes of groups: numbers of rows, or where each ends
_BY_ROWS = 2


@dataclass(frozen=True)
class Stack:
    """One of the two layers of all experts: weight [experts, inputs, out], bias [experts, out]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class GroupedExperts(PackedExperts):
    """In a form."""

    form: Form
    up: Stack
    down: Stack


def forms(asked: Grouping, is_310p: bool) -> list[Form]:
    """Every form that experts of these sizes may have, those first that are faster."""
    sizes = (asked.hidden, asked.up, asked.inner)
    if not 2 <= asked.count <= _MOST_GROUPS or max(sizes) > _LARGEST_SIDE:
        return []
    if not supports("npu_moe_init_routing_v2", "expert_tokens_num_flag", "row_idx_type"):
        return []
    if not supports("npu_grouped_matmul", "group_list_type"):
        return []
    if is_310p:
        if any(size % 16 for size in sizes):
            return []
        return [TILED, UNPERMUTE] if supports("npu_moe_token_unpermute", "probs") else []
    found = [UNPERMUTE] if supports("npu_moe_token_unpermute", "probs") else []
    if supports("npu_moe_finalize_routing", "drop_pad_mode"):
        found.append(FINALIZE)
    return found


def routing_forms(asked: Routing, is_310p: bool) -> list[Form]:
    """Of choosing experts; by the documents there is none on a 310P."""
    is_known = not is_310p and supports("npu_moe_gating_top_k_softmax", "k")
    return [CHOOSING] if is_known and asked.k <= min(asked.count, _MOST_CHOSEN) else []


def stack(
    weights: Iterable[LinearWeight],
    layer: ExpertLayer,
    sizes: tuple[int, int],
    form: Form,
    options: tuple[torch.dtype, torch.device],
) -> Stack:
    """sizes: inputs and outputs of each; options: of the tensors."""
    (inputs, out), (dtype, device) = sizes, options
    made = torch.empty((layer.count, inputs, out), dtype=dtype, device=device)
    bias: Tensor | None = None
    if layer.has_bias:
        # The operator wants them so.
        kind = torch.float32 if dtype == torch.bfloat16 else dtype
        bias = torch.zeros((layer.count, out), dtype=kind, device=device)
    for place, weight in enumerate(weights):
        made[place] = numbers_of(weight, dtype).T.contiguous().to(device)
        if bias is not None and weight.bias is not None:
            bias[place] = weight.bias.to(device, bias.dtype)
    if form == TILED:
        made = torch_npu.npu_format_cast(made, NZ)
    return Stack(made, bias)


def numbers_of(weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """[out, inputs], as `BaseOps.pack` has them."""
    codes = weight.quantized()
    return weight.dense(dtype) if codes is None else codes.dequantize(dtype)


def run(
    x: Tensor,
    index: Tensor,
    shares: Tensor,
    experts: GroupedExperts,
    swiglu: Callable[[Tensor], Tensor],
    is_310p: bool,
) -> Tensor:
    """See `BaseOps.experts`. Nothing waits for the device. swiglu: the ops' own."""
    layer = experts.layer
    kind = _ENDS if is_310p else _COUNTS
    rows, order, groups, _ = torch_npu.npu_moe_init_routing_v2(
        x.contiguous(),
        index.to(torch.int32).contiguous(),
        active_num=index.numel(),
        expert_num=layer.count,
        expert_tokens_num_type=kind,
        expert_tokens_num_flag=True,
        active_expert_range=[0, layer.count],
        quant_mode=-1,  # torch_npu 2.8.0 would quantize
        row_idx_type=0,
    )
    groups = groups.to(torch.int64)
    inner = _product(rows, experts.up, groups, kind)
    inner = swiglu(inner) if layer.is_swiglu else layer.activation(inner)
    found = _product(inner.contiguous(), experts.down, groups, kind)
    if layer.norm is not None:
        found = layer.norm(found)
    weights = shares.to(found.dtype).contiguous()
    out: Tensor
    if experts.form == FINALIZE:
        out = torch_npu.npu_moe_finalize_routing(
            found, None, None, None, weights, order, None, drop_pad_mode=_BY_ROWS
        )
    else:
        out = torch_npu.npu_moe_token_unpermute(found, order, probs=weights)
    return out


def _product(rows: Tensor, of: Stack, groups: Tensor, kind: int) -> Tensor:
    """Of rows [n, inputs] in the order of their experts: [n, out]."""
    result: Any = torch_npu.npu_grouped_matmul(
        [rows],
        [of.weight],
        bias=None if of.bias is None else [of.bias],
        group_list=groups,
        split_item=2,
        group_type=0,
        group_list_type=kind,
    )
    found: Tensor = result[0]
    return found


def choose(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The largest k of the softmax of logits, float32 [T, experts], and which those are, int32; both [T, k]."""
    found: Any = torch_npu.npu_moe_gating_top_k_softmax(logits.contiguous(), k=k)
    return found[0], found[1]
