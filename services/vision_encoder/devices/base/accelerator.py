"""A device with memory of its own, which pinned memory of the host is copied to and from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from services.vision_encoder.devices.base.device import Device
from shared.hardware.torch_device import accelerator_memory

_ALIGNMENT = 64  # bytes: where each tensor begins in an upload
# Of a device's memory, for workspaces of operators that torch does not count.
_RESERVED_SHARE = 0.03


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of a device: all, what this process's tensors may take, weights among them, and what is kept beside."""

    total: int
    allowed: int
    weights: int
    reserved: int


class Accelerator(Device):
    """`runtime`: torch's module for devices of this kind, such as `torch.cuda`."""

    default_batch_patches = 16_384
    runtime: ClassVar[Any]

    def enter_thread(self, uses_ops: bool) -> None:
        """Threads of the host have a current device each."""
        self.runtime.set_device(self.where)
        super().enter_thread(uses_ops)

    def limit_memory(self, share: float) -> MemoryBudget:
        """From now on tensors take at most `share` of the device's memory, less a reserve for operators; what would
        take more raises torch.OutOfMemoryError. Called once the weights are loaded."""
        self.free_unused()
        _, total = self.runtime.mem_get_info()
        reserved = int(total * _RESERVED_SHARE)
        allowed = max(0, int(total * share) - reserved)
        self.runtime.set_per_process_memory_fraction(allowed / total)
        return MemoryBudget(total, allowed, int(self.runtime.memory_allocated()), reserved)

    def memory_by_kind(self) -> Mapping[str, int]:
        """As torch and the driver say."""
        self.runtime.set_device(self.where)
        return accelerator_memory(self.runtime, self.where)

    def free_unused(self) -> None:
        """What torch's allocator has cached."""
        self.runtime.empty_cache()

    def peak_bytes(self) -> int:
        """The most that tensors have taken."""
        return int(self.runtime.max_memory_allocated())

    def upload(self, *tensors: Tensor) -> list[Tensor]:
        """Views of one buffer, aligned to 64 bytes. Nothing waits for the transfer but what is computed later."""
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # torch's allocator gives the memory out again when the copy on the stream is done.
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for view, tensor in zip(_views(staged, starts, tensors), tensors, strict=True):
            view.copy_(tensor)
        return _views(staged.to(self.where, non_blocking=True), starts, tensors)

    def download(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Views of one buffer of pinned memory."""
        together = torch.cat(list(parts))
        here = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
        here.copy_(together, non_blocking=True)
        self.synchronize()
        return list(torch.split(here, [len(part) for part in parts]))

    def synchronize(self) -> None:
        """Waits for the current stream."""
        self.runtime.current_stream().synchronize()


def _views(buffer: Tensor, starts: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
