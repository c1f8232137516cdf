"""Which NPU is simulated, and what it lacks: the support tables of torch_npu's documents."""

import os
from dataclasses import dataclass
from functools import cache

GIB = 1 << 30


@dataclass(frozen=True)
class Personality:
    """`unsupported`: custom ops without a kernel; `hbm`: bytes of the real device."""

    soc: str
    hbm: int
    has_bfloat16: bool = True
    unsupported: frozenset[str] = frozenset()

    @property
    def is_310p(self) -> bool:
        return "310P" in self.soc


_NOT_ON_310P = frozenset(
    {
        "npu_fused_infer_attention_score",
        "npu_fused_infer_attention_score_v2",
        "npu_scatter_pa_kv_cache",
        "npu_fusion_attention",
        "npu_mrope",
        "npu_dynamic_quant",
        "npu_moe_gating_top_k",
        "npu_moe_gating_top_k_softmax",
        "npu_moe_finalize_routing",
        "npu_top_k_top_p",
        "npu_mm_all_reduce_base",
        "index_fill",
        "index_fill_",
        "_npu_matmul_add_fp32",
    }
)

PERSONALITIES = {
    "910B4": Personality("Ascend910B4", 32 * GIB),
    "910B3": Personality("Ascend910B3", 64 * GIB),
    "310P3": Personality("Ascend310P3", 24 * GIB, has_bfloat16=False, unsupported=_NOT_ON_310P),
}


@cache
def personality() -> Personality:
    """Of this process, by FAKE_NPU_SOC."""
    soc = os.environ.get("FAKE_NPU_SOC", "Ascend910B4")
    return PERSONALITIES[soc.removeprefix("Ascend")]
