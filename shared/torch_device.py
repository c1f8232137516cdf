"""The device that a service with tensors computes on."""

import importlib

import torch

from shared.ascend import NNAL, TOOLKIT
from shared.devices import resolve_device
from shared.errors import InvalidRequest


def torch_device(name: str) -> str:
    """As `resolve_device`, and torch can use it: its CUDA may be newer than the driver, its torch_npu than CANN."""
    device = resolve_device(name)
    fault = {"cpu": _no_fault, "cuda": _cuda_fault, "npu": _npu_fault}[device]()
    if not fault:
        return device
    if name == "auto":
        return "cpu"
    raise InvalidRequest(
        "NO_SUCH_DEVICE",
        f"--device {name}: there is a device, but torch {torch.__version__} cannot use it, {fault}",
        field="device",
    )


def _no_fault() -> str:
    return ""


def _cuda_fault() -> str:
    if torch.cuda.is_available():
        return ""
    return "most often because the driver is too old for its CUDA"


def _npu_fault() -> str:
    """Imports torch_npu, which gives torch the device "npu"."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return (
            f"because torch_npu cannot be loaded ({error}): source {TOOLKIT} and {NNAL}, and install"
            " a torch_npu that fits torch and CANN"
        )
    npu = getattr(torch, "npu", None)
    return "" if npu is not None and npu.is_available() else "because torch_npu finds no device"


def torch_arithmetic() -> str:
    """What the bits of torch's operations on a CPU depend on: its version and the instructions that it has chosen."""
    return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
