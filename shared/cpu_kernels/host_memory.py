"""Large tensors in the CPU's memory whose pages are really there."""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

_MADV_POPULATE_WRITE = 23  # Linux 5.14: makes pages present without changing their content
_PIECE = 2 << 20  # bytes asked for at a time: mappings of the process are locked meanwhile


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, touch: bool = True) -> Tensor:
    """A zeroed tensor in anonymous memory of its own, in huge pages where the kernel gives them.

    touch: the pages are made present after `make_present`, so that memory which is promised now
    cannot turn out to be missing later.
    """
    count = int(np.prod(shape))
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(
        -1,
        max(count * dtype.itemsize, mmap.PAGESIZE),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
    if touch:
        _waiting.append((weakref.ref(tensor), len(memory)))
    return tensor


def make_present() -> None:
    """Makes the pages of all tensors present that were made with `touch` and are still used: by a thread of low
    priority, which ends then.

    For when a service is ready: gigabytes of page faults would take the cores from its start.
    """
    tensors, _waiting[:] = list(_waiting), []
    if tensors:
        threading.Thread(target=_touch, args=(tensors,), name="touch", daemon=True).start()


def _touch(tensors: list[tuple[weakref.ref[Tensor], int]]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        # Not the lowest: a killed process is gone, and its connections closed, only when all its threads have had
        # a core to end on, and on a busy machine the lowest waits for one for seconds.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
    libc = ctypes.CDLL(None)
    for reference, size in tensors:
        tensor = reference()  # held while its pages are made
        if tensor is None:
            continue
        for offset in range(0, size, _PIECE):
            start = ctypes.c_void_p(tensor.data_ptr() + offset)
            length = ctypes.c_size_t(min(_PIECE, size - offset))
            if libc.madvise(start, length, _MADV_POPULATE_WRITE) != 0:
                return  # an older kernel: pages come when they are first written


# Tensors whose pages are to be made present, and their bytes.
_waiting: list[tuple[weakref.ref[Tensor], int]] = []
