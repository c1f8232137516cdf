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
_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20  # of addresses, for tensors that lie beside each other
_PIECE = 2 << 20  # bytes asked for at a time: mappings of the process are locked meanwhile


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, touch: bool = True) -> Tensor:
    """A zeroed tensor in anonymous memory of its own, in huge pages where the kernel gives them: it begins with one.

    touch: the pages are made present after `make_present`, so that memory which is promised now
    cannot turn out to be missing later.
    """
    count = int(np.prod(shape))
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    size = count * dtype.itemsize
    memory, start = _map(size)
    tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
    if touch:
        _waiting.append((weakref.ref(tensor), -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))
    return tensor


def lasting_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor that is kept as long as others that are made so, such as a model's weights: beside them in huge
    pages, which its ends share. Their memory is given back together.

    A mapping has small pages before its first whole huge page and behind its last one, up to 4 MB, and over these
    a processor does not read ahead: a weight of 2 MB was read at half the speed (benchmarks/README.md).
    """
    count = int(np.prod(shape))
    size = count * dtype.itemsize
    if count == 0 or size > _CHUNK // 2:
        return zeros_in_huge_pages(shape, dtype, touch=False)
    global _chunk, _used
    with _lock:
        if _chunk is None or _used + size > _CHUNK:
            _chunk, _used = _map(_CHUNK), 0
        memory, start = _chunk
        start += _used
        _used += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def _map(size: int) -> tuple[mmap.mmap, int]:
    """Memory with so many bytes from the beginning of a huge page on, and where that is. What is not used of it takes
    none."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    return memory, -address % _HUGE_PAGE


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

# Where the next tensor lies that is smaller than half a chunk, and the bytes that are taken before it.
_chunk: tuple[mmap.mmap, int] | None = None
_used = 0
_lock = threading.Lock()
