"""What a device decides for an encoder: element types, memory, transfers, threads and operations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from services.vision_encoder.devices.base.ops import TowerOps
from shared.checkpoint.folder import Checkpoint
from shared.devices import require_dtype

_ALIGNMENT = 64  # bytes: where each tensor begins in an upload


class Device(ABC):
    """One device, as the process that encodes on it uses it; `ops` are the operations of towers there."""

    name: ClassVar[str]  # in `shared.devices`
    default_batch_patches: ClassVar[int]  # that a tower takes at a time

    def __init__(self, dtype: torch.dtype, threads: int = 1) -> None:
        """dtype: of weights and rows. threads: on the host."""
        self.dtype = dtype
        self.threads = threads
        self.where = torch.device(self.name)
        self.ops = self._make_ops()

    @classmethod
    def choose_dtype(cls, asked: str, checkpoint: Checkpoint) -> torch.dtype:
        """The element type for `--dtype`. Raises InvalidRequest for one that the device does not compute in."""
        require_dtype(asked, cls.name)
        name = checkpoint.default_dtype(cls.name) if asked == "auto" else asked
        found: torch.dtype = getattr(torch, name)
        return found

    def _make_ops(self) -> TowerOps:
        return TowerOps(self.where, self.dtype)

    def enter_thread(self, uses_ops: bool) -> None:
        """Prepares the thread that will run the encoder. uses_ops: `ops` do its work, not modules of torch."""
        torch.set_num_threads(self.threads)

    @abstractmethod
    def upload(self, *tensors: Tensor) -> list[Tensor]:
        """Host tensors on the device, all in one transfer."""

    @abstractmethod
    def download(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Rows [n, size] of several items on the host, all in one transfer, complete when this returns."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until everything submitted has been computed."""


class Accelerator(Device):
    """A device with memory of its own, which pinned memory of the host is copied to and from."""

    default_batch_patches = 16_384

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


def _views(buffer: Tensor, starts: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
