"""Devices as tables of ops: the one place that knows which there are."""

import importlib

import torch

from services.decoder.ops.base import BaseOps
from shared.errors import InvalidRequest

# Device -> module and what there makes its ops of (dtype, threads, block_size).
_DEVICES = {
    "cpu": ("services.decoder.ops.cpu", "make_ops"),
    "cuda": ("services.decoder.ops.cuda", "make_ops"),
}


def resolve_device(name: str) -> str:
    """ "auto" is cuda where there is one, else cpu. Raises InvalidRequest for what is not here."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in _DEVICES:
        raise InvalidRequest(
            "UNKNOWN_DEVICE",
            f"--device {name}: this version has {', '.join(_DEVICES)}",
            field="device",
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(
            "NO_SUCH_DEVICE", "--device cuda: torch finds no CUDA device here", field="device"
        )
    return name


def load_ops(device: str, dtype: torch.dtype, threads: int = 0, block_size: int = 0) -> BaseOps:
    """The ops of a resolved device; 0 is one thread for each core, and the device's own block."""
    module, name = _DEVICES[device]
    ops: BaseOps = getattr(importlib.import_module(module), name)(dtype, threads, block_size)
    ops.block_size = block_size or ops.block_size
    return ops
