"""Transfers of a step through pinned host memory: one copy each way, for which only the reader of a result waits."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

_ALIGNMENT = 64  # bytes: where each array begins in a buffer
# Buffers of each direction: a step in each of the two plans in flight, the one being collected, the one being filled.
_DEPTH = 4


class Event(Protocol):
    """A mark in the device's work, such as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Waits for it."""


class Copies(Protocol):
    """What a device does for its transfers."""

    def pin(self, size: int) -> Tensor:
        """Host memory [size] of bytes that the device copies from and to while the host goes on."""

    def copy_to_device(self, host: Tensor) -> Tensor:
        """Submits a copy of pinned bytes."""

    def copy_to_host(self, here: Tensor, host: Tensor) -> None:
        """Submits a copy of bytes on the device into pinned memory of the same size."""

    def record_event(self) -> Event:
        """A mark after everything submitted so far."""


class Download:
    """Tensors on their way to the host."""

    def __init__(self, wait: Callable[[], list[Array]]) -> None:
        self._wait = wait

    def wait(self) -> list[Array]:
        """Their content, once it has arrived; overwritten after as many further downloads as the ring is deep."""
        return self._wait()


class Staging:
    """Packs the arrays of one upload or download into one pinned buffer. Buffers are used in turn, and none is touched
    before its copy is done: copies end in the order in which they are submitted. Any thread may call it.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._lock = threading.Lock()
        self._out = _Ring(copies.pin)
        self._in = _Ring(copies.pin)
        self._submitted = 0  # copies so far
        self._ended = 0  # of these, the first ones, which are known to have ended

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Views of one buffer on the device, aligned to 64 bytes, with the content of host arrays."""
        starts, size = _places([array.nbytes for array in arrays])
        with self._lock:
            buffer = self._out.take(size, self._ended)
            host = buffer.memory.numpy()
            for start, array in zip(starts, arrays, strict=True):
                host[start : start + array.nbytes] = _bytes_of(array)
            sent = self._copies.copy_to_device(buffer.memory[:size])
            self._mark(buffer)
        return [
            sent[start : start + array.nbytes].view(_torch_type(array)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Begins to bring tensors of 4-byte elements to the host."""
        packed = torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors])
        with self._lock:
            buffer = self._in.take(packed.nbytes, self._ended)
            memory = buffer.memory[: packed.nbytes]
            self._copies.copy_to_host(packed.view(torch.uint8), memory)
            event, number = self._mark(buffer), self._submitted
        kinds = [(tensor.shape, tensor.dtype, tensor.numel()) for tensor in tensors]

        def wait() -> list[Array]:
            event.synchronize()
            self._ended = max(self._ended, number)
            found, first = [], 0
            whole = memory.view(torch.int32)
            for shape, dtype, count in kinds:
                found.append(whole[first : first + count].view(dtype).view(shape).numpy())
                first += count
            return found

        return Download(wait)

    def _mark(self, buffer: "_Buffer") -> Event:
        """A copy from or to the buffer has been submitted."""
        self._submitted += 1
        buffer.number, buffer.event = self._submitted, self._copies.record_event()
        return buffer.event


class _Buffer:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.number = 0  # of the last copy from or to it
        self.event: Event | None = None  # after that copy


class _Ring:
    def __init__(self, pin: Callable[[int], Tensor]) -> None:
        self._pin = pin
        self._buffers = [_Buffer(pin(0)) for _ in range(_DEPTH)]
        self._turn = 0

    def take(self, size: int, ended: int) -> _Buffer:
        """The next buffer, of at least `size` bytes, its last copy done. `ended`: copies that are known to be."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        if buffer.event is not None and buffer.number > ended:
            buffer.event.synchronize()
        if buffer.memory.numel() < size:
            with torch.inference_mode(
                False
            ):  # whoever comes here next may write to it outside of that mode
                buffer.memory = self._pin(1 << (size - 1).bit_length())
        return buffer


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _torch_type(array: Array) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype
