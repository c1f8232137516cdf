"""Devices that models are computed on, and whether this machine has them: without torch, which takes seconds."""

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path

from shared.errors import InvalidRequest
from shared.hardware.ascend import is_310p, npu_fault

DEVICES = ("cpu", "cuda", "npu")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_DRIVER = "libcuda.so.1"


def resolve_device(name: str) -> str:
    """ "auto" is cuda or npu where one can be used, else cpu. Raises InvalidRequest for a device that this machine does
    not have.
    """
    if name == "auto":
        return next(found for found in ("cuda", "npu", "cpu") if not _fault(found))
    if name not in DEVICES:
        raise InvalidRequest(
            "UNKNOWN_DEVICE",
            f"--device {name}: this version computes on {', '.join(DEVICES[:-1])} and {DEVICES[-1]}",
            field="device",
        )
    if fault := _fault(name):
        raise InvalidRequest(
            "NO_SUCH_DEVICE", f"--device {name}: {fault}; or give --device cpu", field="device"
        )
    return name


def _fault(device: str) -> str:
    """Why this machine does not have a device; empty if it does."""
    return cuda_fault() if device == "cuda" else npu_fault() if device == "npu" else ""


def require_computable(device: str, dtype: str) -> None:
    """Raises InvalidRequest if this machine does not have the device, or the device not the element type."""
    require_dtype(dtype, resolve_device(device))


def require_dtype(dtype: str, device: str) -> None:
    """Raises InvalidRequest for an element type that a resolved device does not compute in."""
    if dtype not in DTYPES:
        raise InvalidRequest(
            "UNSUPPORTED_DTYPE", f"--dtype {dtype}: it may be {', '.join(DTYPES)}", field="dtype"
        )
    if refusal := _dtype_refusal(dtype, device):
        raise InvalidRequest("UNSUPPORTED_DTYPE", f"--dtype {dtype} {refusal}", field="dtype")


def _dtype_refusal(dtype: str, device: str) -> str:
    if dtype == "float16" and device == "cpu":
        return "needs a CUDA device or an NPU: use bfloat16 on the CPU"
    if dtype == "float32" and device == "npu":
        return f"is not what attention on an NPU takes: use {default_dtype(device)}"
    if dtype == "bfloat16" and device == "npu" and is_310p():
        return "is not what an Ascend 310P has: use float16"
    return ""


def default_dtype(device: str) -> str:
    """The 16-bit element type that a resolved device computes in unless told otherwise."""
    return "float16" if device == "npu" and is_310p() else "bfloat16"


@cache
def cuda_fault() -> str:
    """Why there is no CUDA device to compute on; empty if there is one."""
    if not _torch_has_cuda():
        return "the installed torch was built without CUDA; install one that was"
    try:
        driver = ctypes.CDLL(_DRIVER)
        count = ctypes.c_int()
        status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return f"there is no NVIDIA driver ({_DRIVER}) here"
    if status:
        return f"the NVIDIA driver finds no device (error {status})"
    return "" if count.value else "the NVIDIA driver shows no device"


def _torch_has_cuda() -> bool:
    """According to torch's version file."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "version.py"
        if path.is_file():
            return bool(re.search(r"^cuda\b[^=]*= *['\"]", path.read_text(), re.MULTILINE))
    return False
