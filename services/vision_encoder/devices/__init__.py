"""The operations of vision towers, for each device."""

import torch

from services.vision_encoder.devices.cpu import TowerOps
from shared.cpu_kernels.binding import load_kernels
from shared.cpu_kernels.packed_linear import TYPES


def load_tower_ops(device: torch.device, dtype: torch.dtype, threads: int) -> TowerOps | None:
    """The operations for a device and an element type; None where towers run as plain torch modules."""
    if device.type != "cpu" or dtype not in TYPES:
        return None
    kernels = load_kernels(threads)
    return TowerOps(kernels, dtype) if kernels is not None else None
