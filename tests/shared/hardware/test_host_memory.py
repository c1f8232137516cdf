"""Reserved memory costs nothing while a service starts, and is populated soon afterwards."""

import ctypes
import errno
import time
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shared.cpu_kernels import host_memory
from shared.cpu_kernels.host_memory import lasting_zeros, zeros_in_huge_pages

_SIZE = 16 << 20
_PAGE = 4096
_HUGE_PAGE = 2 << 20
_HALF_CHUNK = 32 << 20


def resident(place: int, size: int) -> int:
    """How many of so many bytes from an address on are in memory, 0 if any of them is not mapped: mincore(2)."""
    pages = (ctypes.c_ubyte * (size // _PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), pages) != 0:
        assert ctypes.get_errno() == errno.ENOMEM
        return 0
    return sum(page & 1 for page in pages) * _PAGE


def present(tensor: Tensor) -> float:
    """The share of a tensor's pages that are in memory."""
    return resident(tensor.data_ptr(), tensor.nbytes) / tensor.nbytes


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


def test_a_tensor_of_its_own_begins_with_a_huge_page() -> None:
    for size in (100, _SIZE - 4, _SIZE + 4):
        tensor = zeros_in_huge_pages((size,), torch.uint8)
        assert tensor.data_ptr() % _HUGE_PAGE == 0
        assert tensor.untyped_storage().nbytes() == size


def test_lasting_tensors_lie_beside_each_other() -> None:
    """So that small pages, which are at the ends of a mapping, are few."""
    shapes = [(1152, 896), (3, 5), (896, 896), (4864, 896)] * 6
    tensors = [lasting_zeros(shape, torch.float32) for shape in shapes]
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    mappings = 1
    for (place, size), (following, _) in pairwise(places):
        assert place % _PAGE == 0
        assert following >= place + size
        mappings += following >= place + size + _PAGE
    assert mappings <= 1 + sum(size for _, size in places) // _HALF_CHUNK
    for number, tensor in enumerate(tensors):
        assert not tensor.any()
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert (tensor == number).all()


def test_their_memory_is_given_back_with_the_last_of_them() -> None:
    tensors = [lasting_zeros((_SIZE,), torch.uint8).fill_(1) for _ in range(16)]
    places = [tensor.data_ptr() for tensor in tensors]
    assert all(resident(place, _SIZE) == _SIZE for place in places)
    tensors.clear()
    # A chunk stays for the next one.
    assert sum(resident(place, _SIZE) for place in places) <= 2 * _HALF_CHUNK
