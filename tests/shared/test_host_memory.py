"""Reserved memory costs nothing while a service starts, and is populated soon afterwards."""

import ctypes
import time

import pytest
import torch
from torch import Tensor

from shared.cpu_kernels import host_memory
from shared.cpu_kernels.host_memory import zeros_in_huge_pages

_SIZE = 16 << 20
_PAGE = 4096


def present(tensor: Tensor) -> float:
    """The share of a tensor's pages that are in memory: mincore(2)."""
    size = tensor.nbytes
    pages = (ctypes.c_ubyte * (size // _PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size), pages)
    assert status == 0, ctypes.get_errno()
    return sum(page & 1 for page in pages) / len(pages)


@pytest.fixture
def no_others() -> None:
    """What other tests were promised is made present first."""
    host_memory.make_present()


def test_reserved_pages_are_populated_after_the_start(no_others: None) -> None:
    kept, dropped, lazy = (
        zeros_in_huge_pages((_SIZE,), torch.uint8, touch=touch) for touch in (True, True, False)
    )
    assert [present(tensor) for tensor in (kept, dropped, lazy)] == [0, 0, 0]
    del dropped
    host_memory.make_present()
    deadline = time.monotonic() + 60
    while present(kept) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert present(lazy) == 0
    assert not kept.any()
