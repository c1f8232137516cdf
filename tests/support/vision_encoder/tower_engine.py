"""What computes towers on the CPU in a test: our kernels, or torch as where there is no compiler."""

import pytest
import torch

from services.vision_encoder.devices.cpu import device
from services.vision_encoder.devices.cpu.ops import KernelOps
from shared.cpu_kernels.binding import load_kernels

ENGINES = ("kernels", pytest.param("torch", marks=pytest.mark.full))


def choose(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ENGINES. Skips a test that needs kernels which this machine does not have."""
    if engine == "torch":
        monkeypatch.setattr(device, "load_kernels", lambda threads: None)
    elif load_kernels(1) is None:
        pytest.skip("there are no kernels for this machine")
    on_kernels = isinstance(device.CpuDevice(torch.float32).ops, KernelOps)
    assert on_kernels == (engine == "kernels")
