"""The CPU as the encoder's device: what is uploaded is there already."""

from collections.abc import Mapping, Sequence

import structlog
import torch
from torch import Tensor

from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.devices.cpu.ops import KernelOps
from shared import numerics
from shared.cpu_kernels.binding import load_kernels
from shared.cpu_kernels.packed_linear import TYPES
from shared.hardware.torch_device import process_memory, torch_arithmetic

log = structlog.get_logger(__name__)


class CpuDevice(Device):
    """Our own kernels, or torch's where those cannot be had or do not know the element type."""

    name = "cpu"
    default_batch_patches = 1024

    def _make_ops(self) -> TowerOps:
        kernels = load_kernels(self.threads) if self.dtype in TYPES else None
        if kernels is None:
            return super()._make_ops()
        log.info(
            "CPU kernels",
            instructions=kernels.name,
            arithmetic="portable" if kernels.portable else "fastest",
            why=kernels.why,
            threads=self.threads,
        )
        return KernelOps(self.where, self.dtype, kernels)

    def numerics(self, uses_ops: bool) -> str:
        """The kernels' arithmetic and its version, or torch's where it computes."""
        if uses_ops and isinstance(self.ops, KernelOps):
            return numerics.of_cpu(self.ops.arithmetic, "")
        text = numerics.of_cpu("", torch_arithmetic())
        # Modules of torch get one item at a time; several at once are equal to each alone in float32 alone.
        return numerics.varying(text) if uses_ops and self.dtype != torch.float32 else text

    def enter_thread(self, uses_ops: bool) -> None:
        """Two thread pools would compete for the cores: where the kernels compute, torch has one thread."""
        on_kernels = uses_ops and isinstance(self.ops, KernelOps)
        torch.set_num_threads(1 if on_kernels else self.threads)

    def upload(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors themselves."""
        return list(tensors)

    def download(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The rows themselves."""
        return list(parts)

    def memory_by_kind(self) -> Mapping[str, int]:
        """The process's and the host's: nothing is set aside."""
        return process_memory()

    def synchronize(self) -> None:
        """Nothing to wait for: what a call returns has been computed."""
