"""FIA into tensors that are given: the form that a captured graph takes, whose lengths can be updated."""

from typing import Any

import torch
from torch import Tensor

from tests.ascend.simulator import dispatch
from tests.ascend.simulator.kernels.fused_attention import (
    fused_infer_attention_score,
    fused_infer_attention_score_v2,
)

_WORKSPACE = 1024  # bytes; the simulator needs none


def _install(name: str, compute: dispatch.Kernel) -> None:
    def into(
        *arguments: Any, workspace: Tensor | None = None, out: list[Tensor], **options: Any
    ) -> list[Tensor]:
        out[0].copy_(compute(*arguments, **options)[0])
        return out

    def workspace(*arguments: Any, **options: Any) -> Tensor:
        return torch.empty(_WORKSPACE, dtype=torch.uint8, device="npu")

    def outputs(query: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return torch.full_like(query, float("nan")), torch.empty(1, device="npu")

    dispatch.kernel("npu", f"{name}.out", lambda arguments, options: options["out"])(into)
    dispatch.register("npu", f"_{name}_get_max_workspace", workspace)
    dispatch.register("npu", f"_{name}_infer_output", outputs)


_install("npu_fused_infer_attention_score", fused_infer_attention_score)
_install("npu_fused_infer_attention_score_v2", fused_infer_attention_score_v2)
