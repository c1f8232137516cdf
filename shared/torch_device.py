"""The device that a service with tensors computes on."""

import torch

from shared.devices import resolve_device
from shared.errors import InvalidRequest


def torch_device(name: str) -> str:
    """As `resolve_device`, and torch can use it: its CUDA may be newer than the driver."""
    device = resolve_device(name)
    if device != "cuda" or torch.cuda.is_available():
        return device
    if name == "auto":
        return "cpu"
    raise InvalidRequest(
        "NO_SUCH_DEVICE",
        f"--device {name}: there is a device, but torch {torch.__version__} cannot use it, most often because the"
        " driver is too old for its CUDA",
        field="device",
    )
