"""Streams as kernels in Python see them: they come behind what torch_npu's own thread still has to submit, and what
they use is told to the runtime, which finds streams that use the same memory in no order (runtime/order.cpp)."""

import ctypes
from collections.abc import Iterable, Sequence

import torch_npu
from torch import Tensor

from tests.ascend.simulator.errors import Refused
from tests.ascend.simulator.memory import on_device
from tests.ascend.simulator.runtime import library, own_report

Range = tuple[int, int, bool]  # begin, bytes, whether it is written


class _Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("writes", ctypes.c_int64),
    )


def current() -> int:
    """The current stream of this thread, as the runtime knows it. What was submitted before has reached the runtime:
    with TASK_QUEUE_ENABLE a thread of torch_npu's brings it there, later than a kernel in Python runs."""
    here = torch_npu._C._npu_getDevice()
    return int(torch_npu._C._npu_getCurrentRawStream(here))


def drain() -> None:
    """Everything that this process has submitted reaches the runtime."""
    if torch_npu.npu.is_initialized():
        current()


def begin(stream: int) -> None:
    """A kernel runs next."""
    library().fake_launch(ctypes.c_void_p(stream))


def used(stream: int, ranges: Sequence[Range]) -> None:
    """What the last operation of the stream uses. Raises Refused where another stream uses it too, and nothing says
    which of the two comes first."""
    table = (_Range * len(ranges))(*(_Range(*each) for each in ranges))
    if library().fake_access(ctypes.c_void_p(stream), table, len(ranges)):
        raise Refused(f"streams in no order: {own_report().message.decode()}")


def forget_found() -> None:
    """What was found so far, and not raised yet, is not raised any more."""
    library().fake_access(None, None, 0)


def ranges(read: Iterable[Tensor], written: Iterable[Tensor]) -> list[Range]:
    """The memory of the device that tensors lie in, from their first element to the last one."""
    found = [_range(tensor, False) for tensor in read if on_device(tensor) and tensor.numel()]
    return found + [_range(tensor, True) for tensor in written if tensor.numel()]


def _range(tensor: Tensor, writes: bool) -> Range:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr(), (last + 1) * tensor.element_size(), writes
