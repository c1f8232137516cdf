"""The device that a service with tensors computes on."""

import importlib
from typing import Any

import torch

from shared.errors import InvalidRequest
from shared.hardware import host_memory
from shared.hardware.ascend import NNAL, TOOLKIT
from shared.hardware.devices import resolve_device


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


def accelerator_memory(runtime: Any, device: torch.device) -> dict[str, int]:
    """Bytes of an accelerator's memory: what this process's tensors have (allocated), what torch holds for them
    (reserved), what all processes have (used), and all of it (total). runtime: torch's module for such devices, like
    `torch.cuda`."""
    free, total = runtime.mem_get_info(device)
    return {
        "allocated": int(runtime.memory_allocated(device)),
        "reserved": int(runtime.memory_reserved(device)),
        "used": total - free,
        "total": total,
    }


def process_memory() -> dict[str, int]:
    """Bytes of the host's memory where the CPU computes: what this process has (resident), and all of it (total)."""
    return {"resident": host_memory.resident_bytes(), "total": host_memory.total_bytes()}


def torch_arithmetic() -> str:
    """What the bits of torch's operations on a CPU depend on: its version and the instructions that it has chosen."""
    return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
