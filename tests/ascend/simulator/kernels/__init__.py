"""Reference kernels of torch_npu's own ops, with the documented limits of each as errors."""

from tests.ascend.simulator.kernels import (
    atb_attention,
    experts,
    formats,
    fused_attention,
    fused_attention_out,
    kv_cache,
    layer,
    quantized,
    refused,
    training_attention,
)

__all__ = [
    "atb_attention",
    "experts",
    "formats",
    "fused_attention",
    "fused_attention_out",
    "kv_cache",
    "layer",
    "quantized",
    "refused",
    "training_attention",
]
