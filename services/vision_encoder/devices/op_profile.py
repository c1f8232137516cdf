"""The operations of towers, measured: for finding what an image's time is made of."""

from typing import Any

from torch import Tensor

from services.vision_encoder.devices.base.device import Device
from shared.telemetry.op_profile import OpProfile

_OPS = ("linear", "norm", "add_norm", "attention")


def profile_ops(device: Device) -> OpProfile:
    """Measures those of a device from now on."""
    return OpProfile(device.ops, _OPS, _count_bytes, device.synchronize)


def _count_bytes(name: str, given: tuple[Any, ...], result: Any) -> int:
    return sum(map(_nbytes, (*given, result)))


def _nbytes(value: Any) -> int:
    """Of a tensor, or of those that a weight, a rotation or segments are made of."""
    if isinstance(value, Tensor):
        return value.nbytes
    parts = getattr(value, "__dict__", {}).values()
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))
