"""The ops of a decoder, measured: for finding what a step is made of."""

from types import MethodType
from typing import Any

from torch import Tensor

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.ops import BaseOps
from services.decoder.steps.attention_meta import AttnMeta, Packed, PagedKV
from shared.telemetry.op_profile import OpProfile

# What a model calls in a step. A whole layer is not among them: it runs in its composable form.
_OPS = (
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "linear",
    "linear_float32",
    "largest",
    "swiglu",
    "gate_up_swiglu",
    "linear_gelu",
    "reduce",
    "rope",
    "head_norms",
    "row_norms",
    "qkv_rope_write",
    "kv_write",
    "paged_attention",
    "copy_blocks",
    "swap_blocks",
)


def profile_ops(device: Device) -> OpProfile:
    """Measures the ops of a device from now on; layers are no longer fused."""
    ops = device.ops
    setattr(ops, "decoder_layer", MethodType(BaseOps.decoder_layer, ops))  # noqa: B010

    def count_bytes(name: str, given: tuple[Any, ...], result: Any) -> int:
        read = () if name == "embedding" else given  # of the table only the rows that result
        return sum(map(_nbytes, read)) + _nbytes(result) + _cache_bytes(ops, name, given)

    return OpProfile(ops, _OPS, count_bytes, device.synchronize)


def _cache_bytes(ops: BaseOps, name: str, given: tuple[Any, ...]) -> int:
    """Of the tokens that attention reads, or another op writes."""
    meta = next((value for value in given if isinstance(value, AttnMeta)), None)
    kv = next((value for value in given if isinstance(value, PagedKV)), None)
    if meta is None or kv is None:
        return 0
    tokens = sum(meta.kv_lens) if name == "paged_attention" else meta.cu_q[-1]
    return tokens * ((kv.k.nbytes + kv.v.nbytes) // ops.capacity(kv))


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Packed):
        return _nbytes(value.weight) + _nbytes(value.bias)
    return sum(map(_nbytes, value)) if isinstance(value, tuple) else 0
