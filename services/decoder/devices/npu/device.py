"""The first Ascend NPU that the process sees."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.base.cache_budget import CacheBudget
from services.decoder.devices.base.device import Device, Memory
from services.decoder.devices.base.graphs import Forward, Graphs
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.staging import Event
from services.decoder.devices.npu.attention.coded_cache import numbers_bytes
from services.decoder.devices.npu.attention.fused_attention import padded_size
from services.decoder.devices.npu.errors import translate
from services.decoder.devices.npu.forms import Choice
from services.decoder.devices.npu.graphs import NpuGraphs
from services.decoder.devices.npu.ops import NpuOps
from services.decoder.devices.npu.ops_310p import Npu310POps
from services.decoder.devices.npu.trials import survived
from services.decoder.steps.attention_meta import KVSpec
from shared import kv_cache_dtype, numerics
from shared.errors import ServingError, Unavailable
from shared.hardware import host_memory
from shared.hardware.ascend import is_310p, npu_name
from shared.hardware.torch_device import accelerator_memory
from shared.weights import scheme
from shared.weights.scheme import Scheme

_GIB = 1 << 30
_SHARE = 0.9
_SWAP_SHARE = 0.1
_MOST_PINNED_BYTES = 4 << 30
# What comes when it is served: operators of which the largest step has none, graphs, and pools that are not used whole.
_LEAST_RESERVED_BYTES = 1 << 30
_RESERVED_SHARE = 0.03


class NpuDevice(Device):
    """Steps run on the current stream; what other threads bring comes on a stream of its own."""

    name = "npu"
    default_block_size: ClassVar[int] = 128
    only_block_size: ClassVar[bool] = True
    default_batched_tokens: ClassVar[int] = 2176
    rank_backend: ClassVar[str] = "hccl"
    has_forms: ClassVar[bool] = True
    ops: NpuOps

    def _make_ops(self, dtype: torch.dtype, threads: int) -> BaseOps:
        where, choice = torch.device("npu", 0), Choice.read(self.forms)
        torch_npu.npu.set_device(where)
        # What was free before anything of this process was on the device.
        self._free_at_start = self.memory().free
        self._copies = torch_npu.npu.Stream()
        if not is_310p():
            return NpuOps(where, dtype, self.block_size, choice, self.weights)
        torch_npu.npu.set_compile_mode(jit_compile=False)  # else every new shape would be compiled
        return Npu310POps(where, dtype, self.block_size, choice)

    def numerics(self, *, by_torch: bool = False) -> str:
        """The kind of NPU."""
        return numerics.of_accelerator(self.name, npu_name())

    def memory(self) -> Memory:
        """As the driver says, for all processes."""
        return Memory(*torch_npu.npu.mem_get_info())

    def memory_by_kind(self) -> Mapping[str, int]:
        """As torch and the driver say."""
        self.bind_thread()
        return accelerator_memory(torch_npu.npu, self.ops.device)

    def require_free(self, share: float | None, sharers: int) -> None:
        """Raises Unavailable naming what is free."""
        memory = Memory(self._free_at_start, self.memory().total)
        wanted = self._allowed(memory, share, sharers)
        if memory.free < wanted:
            raise Unavailable(
                "DEVICE_MEMORY_TAKEN",
                f"{memory.free / _GIB:.1f} of {memory.total / _GIB:.1f} GiB of the NPU's memory are free, but"
                f" --gpu-memory-utilization asks for {wanted / _GIB:.1f} GiB: end what holds the rest (npu-smi info"
                f" lists it), or give at most --gpu-memory-utilization {self._largest_share(memory, sharers)}",
            )

    def cache_budget(
        self, share: float | None, sharers: int, step_bytes: int, reserved: int | None = None
    ) -> CacheBudget:
        """`share` of all memory (0.9 unless given), less weights, the largest step, what is outside of torch's pools
        since the process began, and a reserve for what comes to that; of the rest on a 310P half, whose attention
        needs as much again."""
        # Before caches are emptied: workspaces of operators, which the next step takes again, would go with them.
        memory = self.memory()
        outside = self._free_at_start - memory.free - int(torch_npu.npu.memory_reserved())
        torch_npu.npu.empty_cache()  # what the profile has freed is for others on the device
        if reserved is None:
            reserved = max(_LEAST_RESERVED_BYTES, int(memory.total * _RESERVED_SHARE))
        budget = CacheBudget(
            ("the NPU's memory (--gpu-memory-utilization)", self._allowed(memory, share, sharers)),
            (
                ("weights", int(torch_npu.npu.memory_allocated())),
                ("the largest step (--max-num-batched-tokens, --max-num-seqs)", step_bytes),
                ("CANN, HCCL and workspaces of operators", max(0, outside)),
                ("what it takes later (--npu-reserved-memory)", reserved),
            ),
        )
        return replace(budget, most=budget.nbytes // 2) if is_310p() else budget

    @staticmethod
    def _allowed(memory: Memory, share: float | None, sharers: int) -> int:
        return int(memory.total * (share or _SHARE) / sharers)

    @staticmethod
    def _largest_share(memory: Memory, sharers: int) -> float:
        return math.floor(100 * min(1.0, sharers * memory.free / memory.total)) / 100

    def swap_bytes(self, sharers: int) -> int:
        """A tenth of what is free on the host, 4 GiB at most: it is pinned from the start. On a 310P none: nothing says
        that copies of its blocks keep their layout."""
        if is_310p():
            return 0
        return min(int(host_memory.available_bytes() * _SWAP_SHARE / sharers), _MOST_PINNED_BYTES)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Of what torch has given out."""
        before = int(torch_npu.npu.memory_allocated())
        torch_npu.npu.reset_peak_memory_stats()
        run()
        self.synchronize()
        return int(torch_npu.npu.max_memory_allocated()) - before

    def attention_bytes(self, spec: KVSpec, tokens: int) -> int:
        """Of codes: the numbers that are made of them for prompts."""
        if not spec.coded:
            return 0
        width = padded_size(max(spec.k_size, spec.v_size))
        return numbers_bytes(spec, tokens, width)

    def free_unused(self) -> None:
        """What torch's allocator has cached."""
        torch_npu.npu.empty_cache()

    def pin(self, size: int) -> Tensor:
        """Page-locked host memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def record_event(self) -> Event:
        """On the current stream."""
        event = torch_npu.npu.Event()
        event.record()
        mark: Event = event
        return mark

    def bind_thread(self) -> None:
        """Each thread has a device of its own."""
        torch_npu.npu.set_device(self.ops.device)

    def copy_in(self, host: Tensor) -> Tensor:
        """On the stream of copies."""
        self.bind_thread()
        with torch_npu.npu.stream(self._copies):
            here = host.pin_memory().to(self.ops.device, non_blocking=True).to(self.ops.dtype)
        # Steps read it: its memory may not be used for the next copy while they do.
        here.record_stream(torch_npu.npu.default_stream())
        self._copies.synchronize()
        return here

    def require_scheme(self, name: str) -> None:
        """Raises InvalidRequest for one that no operator here multiplies with."""
        scheme.require_on_npu(name, is_310p())

    def require_kv_cache(self, name: str) -> None:
        """Raises InvalidRequest on a 310P. Elsewhere attention is tried with the model's heads once there is one."""
        kv_cache_dtype.require_on_npu(name, is_310p())

    def find_scheme(self, name: str, parameters: int) -> Scheme | None:
        """Where activations have 8 bits too, weights have one scale for each output: the operator takes no groups."""
        found = super().find_scheme(name, parameters)
        return replace(found, group=0) if found is not None and found.digits == 1 else found

    def synchronize(self) -> None:
        """Waits for the device."""
        torch_npu.npu.synchronize()

    @property
    def has_graphs(self) -> bool:
        """Not on a 310P, whose attention has its lengths from elsewhere."""
        return not is_310p()

    @property
    def graphs_take_coded_windows(self) -> bool:
        """They attend to numbers that are made of the codes of so many blocks as the host knows lengths of."""
        return False

    def make_graphs(self, forward: Forward, sizes: Sequence[int], axes: int, width: int) -> Graphs:
        """Of torch_npu."""
        return NpuGraphs(self.ops, forward, sizes, axes, width)

    def ended_within(self, what: str) -> bool:
        """By the file that such a process leaves."""
        return survived.has_ended(self._named(what))

    @contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """See `Device.surviving`. Raises RuntimeError where the device computes no more behind it."""
        with survived.attempt(self._named(what)):
            yield
            (torch.zeros(1, device=self.ops.device) + 1).cpu()

    def _named(self, what: str) -> str:
        return f"{self.ops.name} {self.ops.dtype} {what}"

    def translate(self, error: Exception) -> ServingError | None:
        """By CANN's codes and sentences."""
        return translate(error)
