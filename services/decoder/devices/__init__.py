"""Devices as tables of ops: which of `shared.devices` has which."""

import importlib

import torch

from services.decoder.devices.base.ops import BaseOps

# Device -> module and what there makes its ops of (dtype, threads, block_size).
_DEVICES = {
    "cpu": ("services.decoder.devices.cpu.ops", "make_ops"),
    "cuda": ("services.decoder.devices.cuda.ops", "make_ops"),
}


def load_ops(device: str, dtype: torch.dtype, threads: int = 0, block_size: int = 0) -> BaseOps:
    """The ops of a resolved device; 0 is one thread for each core, and the device's own block."""
    module, name = _DEVICES[device]
    ops: BaseOps = getattr(importlib.import_module(module), name)(dtype, threads, block_size)
    ops.block_size = block_size or ops.block_size
    return ops
