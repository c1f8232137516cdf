"""What operators take of the device's memory beside their results, and CANN when a process first computes.

How much, no document says. Here it is 256 MiB for CANN, and for a workspace 16 MiB, the least that a kernel with
products takes, and the bytes of its first argument where it reads that again; of a real device, and as much less as the
simulated one is smaller.

torch_npu takes the workspace of an operator of CANN out of the pools of its tensors, unless TASK_QUEUE_ENABLE is 2, and
gives it back when the call has been submitted (op-plugin, `EXEC_NPU_CMD`). That of an operator of NNAL comes from an
allocator that keeps the largest one of each stream until caches are emptied (`at_npu::native::allocate_workspace`).
"""

import ctypes
import os
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from tests.ascend.simulator import graphs, runtime

_CANN = 256 << 20
_LEAST = 16 << 20
_OF_NNAL = "_npu_"
# They take their arguments again: parts of sums, or values in another order.
_READ_AGAIN = frozenset(
    {
        "npu_fused_infer_attention_score",
        "npu_fused_infer_attention_score_v2",
        "npu_fusion_attention",
        "argsort",
        "cumsum",
        "sort",
        "topk",
    }
)
_PRODUCTS = frozenset({"addmm", "bmm", "linear", "matmul", "mm"})


def take(name: str, tensors: Iterable[Tensor], stream: int) -> Tensor | None:
    """The workspace of a call of an operator with these arguments on a stream, until it has run; None where torch's
    pools have no part in it. Raises torch.OutOfMemoryError."""
    if not _cann_is_there():
        raise torch.OutOfMemoryError("NPU out of memory: CANN cannot load its kernels")
    if name.startswith(_OF_NNAL):
        if not _library().fake_workspace(_least() + _first(tensors), stream):
            raise torch.OutOfMemoryError(f"NPU out of memory: the workspace of {name}")
        return None
    if graphs.is_updating():  # the call has the workspace of its capture
        return None
    base = name.partition(".")[0]
    if base in _READ_AGAIN:
        return torch.empty(_least() + _first(tensors), dtype=torch.uint8, device="npu")
    if base in _PRODUCTS:
        return torch.empty(_least(), dtype=torch.uint8, device="npu")
    return None


def _first(tensors: Iterable[Tensor]) -> int:
    return next((tensor.nbytes for tensor in tensors), 0)


def of_cann() -> int:
    """Bytes that CANN takes."""
    return int(_library().fake_scaled(_CANN))


@cache
def _cann_is_there() -> bool:
    return bool(_library().fake_take_for_cann(of_cann()))


@cache
def _least() -> int:
    given = os.environ.get("FAKE_NPU_WORKSPACE")
    return int(given) if given else int(_library().fake_scaled(_LEAST))


@cache
def _library() -> ctypes.CDLL:
    found = runtime.library()
    found.fake_scaled.restype = ctypes.c_uint64
    found.fake_scaled.argtypes = found.fake_take_for_cann.argtypes = (ctypes.c_uint64,)
    found.fake_workspace.argtypes = (ctypes.c_uint64, ctypes.c_void_p)
    found.fake_take_for_cann.restype = found.fake_workspace.restype = ctypes.c_bool
    return found
