"""Pages of mapped files that are resident and no longer needed."""

import ctypes
import mmap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_DONTNEED = 4  # Linux: private pages of a file are read from it again when they are looked at
_MAPS = Path("/proc/self/maps")


def give_back(tensor: "Tensor") -> None:
    """Takes what a tensor spans out of the resident set, where it lies in a mapped file: its values stay, and are read
    from the file, most of them from the system's memory, when they are looked at again. Memory that is no file's, and
    systems other than Linux, are left alone. The tensor must never have been written to.
    """
    if tensor.numel() == 0 or not _MAPS.exists():
        return
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in strides)
    first = tensor.data_ptr()
    last = first + span * tensor.element_size()
    page = mmap.PAGESIZE
    for begin, end in _file_mappings():
        start = -(-max(first, begin) // page) * page
        stop = min(last, end) // page * page
        if start < stop:
            _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)


def _file_mappings() -> Iterator[tuple[int, int]]:
    """Addresses [begin, end) of private mappings of files: an inode other than 0."""
    with _MAPS.open() as lines:
        for line in lines:
            addresses, access, _, _, inode, *_ = line.split(maxsplit=5)
            if inode != "0" and access[3] == "p":
                begin, _, end = addresses.partition("-")
                yield int(begin, 16), int(end, 16)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def give_back_freed() -> None:
    """Memory that was freed and that the C library keeps for later, which is not little where pieces of many sizes came
    and went beside others that stay."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
