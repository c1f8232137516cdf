"""The first CUDA device that the process sees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from services.decoder.devices.base.cache_budget import CacheBudget
from services.decoder.devices.base.device import Device, Memory
from services.decoder.devices.base.graphs import Forward, Graphs
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.staging import Event
from services.decoder.devices.cuda.graphs import CudaGraphs
from services.decoder.devices.cuda.ops import CudaOps
from shared import numerics
from shared.hardware import host_memory
from shared.hardware.torch_device import accelerator_memory
from shared.weights.scheme import Scheme

_SHARE = 0.9
_SWAP_SHARE = 0.1
_MOST_PINNED_BYTES = 4 << 30


class CudaDevice(Device):
    """Steps run on the current stream; what other threads bring comes on a stream of its own."""

    name = "cuda"
    default_batched_tokens: ClassVar[int] = 2176
    rank_backend: ClassVar[str] = "nccl"
    ops: CudaOps

    def _make_ops(self, dtype: torch.dtype, threads: int) -> BaseOps:
        self._copies = torch.cuda.Stream()
        return CudaOps(torch.device("cuda"), dtype, self.block_size, has_kernels=True)

    def numerics(self, *, by_torch: bool = False) -> str:
        """The kind of GPU."""
        return numerics.of_accelerator(self.name, torch.cuda.get_device_name(self.ops.device))

    def memory(self) -> Memory:
        """As the driver says, for all processes."""
        return Memory(*torch.cuda.mem_get_info(self.ops.device))

    def memory_by_kind(self) -> Mapping[str, int]:
        """As torch and the driver say."""
        return accelerator_memory(torch.cuda, self.ops.device)

    def cache_budget(
        self, share: float | None, sharers: int, step_bytes: int, reserved: int | None = None
    ) -> CacheBudget:
        """`share` of all memory (0.9 unless given), less what is taken."""
        memory = self.memory()
        taken = memory.total - memory.free
        if sharers > 1:  # each counts its own
            taken = torch.cuda.memory_reserved(self.ops.device)
        allowed = int(memory.total * (share or _SHARE) / sharers)
        return CacheBudget(
            ("the device's memory", allowed),
            (("what is taken already", taken), ("the largest step", step_bytes)),
        )

    def swap_bytes(self, sharers: int) -> int:
        """A tenth of what is free on the host, 4 GiB at most: it is pinned from the start."""
        return min(int(host_memory.available_bytes() * _SWAP_SHARE / sharers), _MOST_PINNED_BYTES)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Of what torch has given out."""
        before = torch.cuda.memory_allocated(self.ops.device)
        torch.cuda.reset_peak_memory_stats(self.ops.device)
        run()
        self.synchronize()
        return int(torch.cuda.max_memory_allocated(self.ops.device)) - before

    def free_unused(self) -> None:
        """What torch's allocator has cached."""
        torch.cuda.empty_cache()

    def pin(self, size: int) -> Tensor:
        """Page-locked host memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def record_event(self) -> Event:
        """On the current stream."""
        event = torch.cuda.Event()
        event.record()
        return event

    def copy_in(self, host: Tensor) -> Tensor:
        """On the stream of copies."""
        with torch.cuda.stream(self._copies):
            here = host.pin_memory().to(self.ops.device, self.ops.dtype, non_blocking=True)
        # Steps read it: its memory may not be used for the next copy while they do.
        here.record_stream(torch.cuda.default_stream(self.ops.device))
        self._copies.synchronize()
        return here

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self.ops.device)

    def require_scheme(self, name: str) -> None:
        """Any."""

    def find_scheme(self, name: str, parameters: int) -> Scheme | None:
        """Where activations have 8 bits too, weights have one scale for each output: torch multiplies whole numbers of
        all inputs at once."""
        found = super().find_scheme(name, parameters)
        return replace(found, group=0) if found is not None and found.digits == 1 else found

    @property
    def has_graphs(self) -> bool:
        """Where one rank computes: captured calls between ranks were never tried."""
        return self.ops.ranks is None

    def make_graphs(self, forward: Forward, sizes: Sequence[int], axes: int, width: int) -> Graphs:
        """Of torch."""
        return CudaGraphs(self.ops, forward, sizes, axes, width)
