"""Which of torch's ops the device computes on its AI CPUs, slowly, because its AI cores have no kernel for the dtype.

The lists are those by which CANN's own functions choose (`math/*/op_api` and `index/*/op_api` of CANN's ops-math and
ops-nn, August 2026), of the ops that models use with other dtypes than float16, bfloat16 and float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.ascend.simulator import counters
from tests.ascend.simulator.personality import personality

_HALF, _BRAIN, _FLOAT = torch.float16, torch.bfloat16, torch.float32
_FLOATS = (_HALF, _BRAIN, _FLOAT)
_I8, _U8, _I16, _I32, _I64 = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
_BOOL = torch.bool
_COMPARED = (*_FLOATS, _I8, _U8, _I32, _I64)
_SUMMED = (*_COMPARED, _BOOL)
# By op, the dtypes of its first tensor that AI cores take.
_ON_AI_CORES: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("topk", "sort", "argsort", "msort"), _FLOATS),
    **dict.fromkeys(("exp", "rsqrt", "sigmoid", "silu", "gelu", "softmax", "_softmax"), _FLOATS),
    "cumsum": (*_FLOATS, _I32),
    **dict.fromkeys(("eq", "ne"), _SUMMED),
    **dict.fromkeys(("lt", "le", "gt", "ge"), _COMPARED),
    **dict.fromkeys(("add", "sub", "mul"), _SUMMED),
    **dict.fromkeys(("minimum", "maximum"), (*_FLOATS, _I8, _I32, _I64)),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), (*_FLOATS, _I32, _I64)),
    "floor_divide": (*_FLOATS, _I8, _U8, _I32),
    "masked_fill": (*_FLOATS, _BOOL, _I8, _I32),
    "gather": (*_FLOATS, _I8, _U8, _I16, _I32, _I64, _BOOL),
    "index_select": (*_FLOATS, _I8, _U8, _I16, _I32, _I64, _BOOL),
    "scatter": (*_FLOATS, _I8, _U8, _I32),
    "arange": (*_FLOATS, _I32, _I64),
}
_OF_A_SINGLE_VALUE = ("sort", "argsort", "msort")  # along the last dimension


def note(name: str, tensors: Sequence[Tensor]) -> None:
    """Counts a call that goes to the AI CPUs (`counters.on_ai_cpu`)."""
    known = _ON_AI_CORES.get(name.removesuffix("_"))
    first = next((tensor for tensor in tensors if tensor.device.type == "npu"), None)
    if known is None or first is None:
        return
    lacks_type = first.dtype not in known or (
        first.dtype == _BRAIN and not personality().has_bfloat16
    )
    alone = name in _OF_A_SINGLE_VALUE and first.shape[-1:] == (1,)
    if lacks_type or alone:
        counters.on_ai_cpu[f"{name} of {str(first.dtype).removeprefix('torch.')}"] += 1
