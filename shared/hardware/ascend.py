"""Ascend NPUs as this machine has them, asked of CANN itself: without torch, which takes seconds."""

import contextlib
import ctypes
import importlib.util
from functools import cache
from pathlib import Path

TOOLKIT = "/usr/local/Ascend/ascend-toolkit/set_env.sh"
NNAL = "/usr/local/Ascend/nnal/atb/set_env.sh"
# For processes that may import torch, before they do. torch would import every torch_npu it finds, and fail where that
# cannot be loaded; torch_npu's allocator would split large blocks for good; and ranks would wait 2 minutes for one that
# loads slowly, and half an hour for one that is gone.
ENVIRONMENT = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_CONNECT_TIMEOUT": "600",
    "HCCL_EXEC_TIMEOUT": "60",
}
# For ranks whose steps are captured as graphs: collectives then run on the vector cores, and take none of the streams
# of which graphs need many.
ENVIRONMENT_OF_CAPTURED_RANKS = {"HCCL_OP_EXPANSION_MODE": "AIV"}
_RUNTIME = "libascendcl.so"
_OPERATORS = "libatb.so"
_KERNELS = "libopapi.so"


@cache
def npu_fault() -> str:
    """Why there is no NPU to compute on; empty if there is one."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (the extra `npu`)"
    try:
        runtime = ctypes.CDLL(_RUNTIME)
        count = ctypes.c_uint32()
        status = runtime.aclrtGetDeviceCount(ctypes.byref(count))
    except (OSError, AttributeError) as error:
        return f"CANN cannot be loaded ({error}); source {TOOLKIT} first"
    if status:
        return f"the Ascend driver finds no device (error {status}); npu-smi info tells more"
    if not count.value:
        return "the Ascend driver shows no device; see ASCEND_RT_VISIBLE_DEVICES"
    if is_310p() and (fault := atb_fault()):
        return fault
    return ""


def atb_fault() -> str:
    """Why torch_npu's operators of the NNAL package, of which a 310P needs some, cannot be used; empty if they can."""
    try:
        ctypes.CDLL(_OPERATORS)
    except OSError as error:
        return f"NNAL's operators cannot be loaded ({error}); source {NNAL} first"
    return ""


@cache
def npu_name() -> str:
    """The chip's name, such as "Ascend910B4"; empty where there is none."""
    try:
        name = ctypes.CDLL(_RUNTIME).aclrtGetSocName
    except (OSError, AttributeError):
        return ""
    name.restype = ctypes.c_char_p
    return (name() or b"").decode()


def installation() -> list[str]:
    """What tells one installation of CANN and NNAL from another: places, sizes and times of their libraries, as far as
    this process has loaded them."""
    for library in (_RUNTIME, _OPERATORS):
        with contextlib.suppress(OSError):
            ctypes.CDLL(library)
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines}
    found = sorted(path for path in paths if path.name in (_RUNTIME, _OPERATORS))
    # The kernels lie beside the runtime, and are loaded later.
    found += [path.with_name(_KERNELS) for path in found if path.name == _RUNTIME]
    return [
        f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        for path in found
        if path.exists() and (stat := path.stat())
    ]


def is_310p() -> bool:
    """Whether the NPU is one of the 310P family: float16 alone, and attention by other operators."""
    return npu_name().startswith("Ascend310P")
