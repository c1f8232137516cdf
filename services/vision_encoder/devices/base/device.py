"""What a device decides for an encoder: element types, memory, transfers, threads and operations."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from services.vision_encoder.devices.base.ops import TowerOps
from shared.checkpoint.folder import Checkpoint
from shared.hardware.devices import require_dtype


class Device(ABC):
    """One device, as the process that encodes on it uses it; `ops` are the operations of towers there."""

    name: ClassVar[str]  # in `shared.hardware.devices`
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

    @abstractmethod
    def numerics(self, uses_ops: bool) -> str:
        """What bits depend on here beyond weights and element type (`shared/numerics.py`): encoders where it is equal
        compute equal rows, unless these vary with the batch, which the text says. uses_ops: as for
        `enter_thread`."""

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
    def memory_by_kind(self) -> Mapping[str, int]:
        """Bytes of the device's memory by what they are, for metrics; any thread may ask."""

    def free_unused(self) -> None:  # noqa: B027
        """Gives memory back that torch keeps for tensors to come. Of the host's it keeps none."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until everything submitted has been computed."""
