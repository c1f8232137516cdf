"""The CPU as a device: its memory is the host's, which it shares with all other services."""

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import structlog
import torch
from torch import Tensor

from services.decoder.devices.base.cache_budget import CacheBudget
from services.decoder.devices.base.device import Device, Memory
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.staging import Array, Download
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.devices.cpu.torch_ops import TorchCpuOps
from shared import kv_cache_dtype, numerics
from shared.cpu_kernels import binding
from shared.cpu_kernels.packed_linear import TYPES
from shared.hardware import host_memory, processors
from shared.hardware.torch_device import process_memory, torch_arithmetic
from shared.weights import scheme

log = structlog.get_logger(__name__)

_SHARE = 0.4  # of free memory; the rest is for other services
_SWAP_SHARE = 0.1
_MOST_CACHE_BYTES = 4 << 30
_MOST_CACHE_BYTES_SMALL = 512 << 20  # a hundred thousand tokens of a model that small
_CLEAR = Path("/proc/self/clear_refs")


class CpuDevice(Device):
    """Our own kernels, or torch's where those cannot be had or do not know type or block."""

    name = "cpu"
    default_batched_tokens: ClassVar[int] = 272
    profile_in_full: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False
    is_host: ClassVar[bool] = True
    rank_backend: ClassVar[str] = "gloo"

    def _make_ops(self, dtype: torch.dtype, threads: int) -> BaseOps:
        found = processors.find()
        # The operations of a small model are shorter than the wait for a second thread.
        threads = threads or (1 if self.small_model else found.threads)
        kernels = binding.load_kernels(threads) if dtype in TYPES else None
        if kernels is None or self.block_size % kernels.page:
            torch.set_num_threads(threads)
            return TorchCpuOps(torch.device("cpu"), dtype, self.block_size)
        torch.set_num_threads(1)  # two pools would take the cores from each other
        log.info(
            "CPU kernels",
            instructions=kernels.name,
            arithmetic="portable" if kernels.portable else "fastest",
            why=kernels.why,
            threads=threads,
            processors=str(found),
        )
        return CpuOps(dtype, kernels, self.block_size)

    def numerics(self, *, by_torch: bool = False) -> str:
        """The kernels' arithmetic and its version; torch's own where it computes."""
        arithmetic = self.ops.arithmetic if isinstance(self.ops, CpuOps) else ""
        by_torch = by_torch or not arithmetic
        return numerics.of_cpu(arithmetic, torch_arithmetic() if by_torch else "")

    def require_scheme(self, name: str) -> None:
        """Any, where the kernels compute."""
        if scheme.makes_codes(name) and not isinstance(self.ops, CpuOps):
            raise scheme.refused(
                name,
                "the CPU kernels are needed, and torch does their work here; install a C++ compiler",
            )

    def require_kv_cache(self, name: str) -> None:
        """Any, where the kernels compute."""
        if name != kv_cache_dtype.AUTO and not isinstance(self.ops, CpuOps):
            raise kv_cache_dtype.refused(
                name,
                "the CPU kernels are needed, and torch does their work here; install a C++ compiler",
            )

    def memory(self) -> Memory:
        """The host's, as far as our control group allows."""
        return Memory(host_memory.available_bytes(), host_memory.total_bytes())

    def memory_by_kind(self) -> Mapping[str, int]:
        """The process's and the host's: nothing is set aside."""
        return process_memory()

    def cache_budget(
        self, share: float | None, sharers: int, step_bytes: int, reserved: int | None = None
    ) -> CacheBudget:
        """`share` of what is free (0.4 unless given), 4 GiB at most, or 512 MiB for a small model: it is not the
        decoder's alone, and the cache touches all of it."""
        most = _MOST_CACHE_BYTES_SMALL if self.small_model else _MOST_CACHE_BYTES
        allowed = int(self.memory().free * (share or _SHARE) / sharers)
        return CacheBudget(
            ("the free memory of the host", allowed), (("the largest step", step_bytes),), most
        )

    def swap_bytes(self, sharers: int) -> int:
        """A tenth of what is free; it costs nothing before it is used."""
        return int(self.memory().free * _SWAP_SHARE / sharers)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Of resident memory."""
        with contextlib.suppress(AttributeError):  # a C library without it
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again unseen
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # the highest mark is that of now: proc(5)
        before = host_memory.resident_bytes()
        run()
        return max(0, host_memory.peak_resident_bytes() - before)

    def upload(self, *arrays: Array) -> list[Tensor]:
        """Views of the arrays themselves."""
        return [torch.from_numpy(array) for array in arrays]

    def download(self, *tensors: Tensor) -> Download:
        """Views of the tensors themselves."""
        found = [tensor.numpy() for tensor in tensors]
        return Download(lambda: found)

    def synchronize(self) -> None:
        """Nothing to wait for: what a call returns has been computed."""
