"""Large tensors in the CPU's memory whose pages are really there."""

import contextlib
import ctypes
import mmap
import os
import queue
import threading

import numpy as np
import torch
from torch import Tensor

_MADV_POPULATE_WRITE = 23  # Linux 5.14: makes pages present without changing their content
_PIECE = 2 << 20  # bytes asked for at a time: mappings of the process are locked meanwhile


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, touch: bool = True) -> Tensor:
    """A zeroed tensor in anonymous memory of its own, in huge pages where the kernel gives them.

    touch: the pages are made present by a thread of low priority, so that memory which is promised
    now cannot turn out to be missing later, and a start does not wait for gigabytes of page faults.
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
        _toucher.touch(tensor, len(memory))
    return tensor


class _Toucher:
    """One thread for all tensors; it begins with the first and sleeps when there are no more."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Tensor, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def touch(self, tensor: Tensor, size: int) -> None:
        """Makes the tensor's pages present, some time soon."""
        self._waiting.put((tensor, size))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="touch", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            # Not the lowest: a killed process is gone, and its connections closed, only when all its threads have had
            # a core to end on, and on a busy machine the lowest waits for one for seconds.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        libc = ctypes.CDLL(None)
        while True:
            tensor, size = self._waiting.get()
            for offset in range(0, size, _PIECE):
                start = ctypes.c_void_p(tensor.data_ptr() + offset)
                length = ctypes.c_size_t(min(_PIECE, size - offset))
                if libc.madvise(start, length, _MADV_POPULATE_WRITE) != 0:
                    break  # an older kernel: pages come when they are first written
            del tensor


_toucher = _Toucher()
