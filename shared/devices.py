"""Devices that models are computed on, and whether this machine has them: without torch, which takes seconds."""

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path

from shared.errors import InvalidRequest

DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_DRIVER = "libcuda.so.1"


def resolve_device(name: str) -> str:
    """ "auto" is cuda where it can be used, else cpu. Raises InvalidRequest for a device that this machine does not
    have.
    """
    if name == "auto":
        return "cpu" if cuda_fault() else "cuda"
    if name not in DEVICES:
        raise InvalidRequest(
            "UNKNOWN_DEVICE",
            f"--device {name}: this version computes on {' and '.join(DEVICES)}",
            field="device",
        )
    if name == "cuda" and (fault := cuda_fault()):
        raise InvalidRequest("NO_SUCH_DEVICE", f"--device cuda: {fault}", field="device")
    return name


def require_computable(device: str, dtype: str) -> None:
    """Raises InvalidRequest if this machine does not have the device, or the device not the element type."""
    require_dtype(dtype, resolve_device(device))


def require_dtype(dtype: str, device: str) -> None:
    """Raises InvalidRequest for an element type that a resolved device does not compute in."""
    if dtype not in DTYPES:
        raise InvalidRequest(
            "UNSUPPORTED_DTYPE", f"--dtype {dtype}: it may be {', '.join(DTYPES)}", field="dtype"
        )
    if dtype == "float16" and device == "cpu":
        raise InvalidRequest(
            "UNSUPPORTED_DTYPE",
            "--dtype float16 needs a CUDA device: use bfloat16 on the CPU",
            field="dtype",
        )


@cache
def cuda_fault() -> str:
    """Why there is no CUDA device to compute on; empty if there is one."""
    if not _torch_has_cuda():
        return (
            "the installed torch was built without CUDA; install one that was, or give --device cpu"
        )
    try:
        driver = ctypes.CDLL(_DRIVER)
        count = ctypes.c_int()
        status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return f"there is no NVIDIA driver ({_DRIVER}) here; give --device cpu"
    if status:
        return f"the NVIDIA driver finds no device (error {status}); give --device cpu"
    return "" if count.value else "the NVIDIA driver shows no device; give --device cpu"


def _torch_has_cuda() -> bool:
    """According to torch's version file."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "version.py"
        if path.is_file():
            return bool(re.search(r"^cuda\b[^=]*= *['\"]", path.read_text(), re.MULTILINE))
    return False
