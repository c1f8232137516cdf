"""The layout FRACTAL_NZ: torch_npu keeps the book on it, the bytes stay in rows."""

import torch_npu
from torch import Tensor

from tests.ascend.simulator import dispatch, streams
from tests.ascend.simulator.errors import require
from tests.ascend.simulator.memory import host_view
from tests.ascend.simulator.personality import personality

NZ, _ROWS = 29, 2
_ON = ("enable", b"enable")


def format_cast(
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """A copy in that format. 910B keeps rows where NZ is asked for, unless `allow_internal_format` is set."""
    stream = dispatch.launch("npu_format_cast", (input,), {})
    require(
        acl_format != NZ or input.dim() >= 2, "npu_format_cast: NZ takes two dimensions or more"
    )
    keeps = personality().is_310p or torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT") in _ON
    kept = acl_format if keeps else _ROWS
    made: Tensor = torch_npu.empty_with_format(
        input.shape, dtype=input.dtype, device=input.device, acl_format=kept
    )
    target, values = host_view(made), host_view(input)
    dispatch.run_on(stream, lambda: target.copy_(values), streams.ranges([input], [made]))
    return made


dispatch.register("npu", "npu_format_cast", format_cast)
