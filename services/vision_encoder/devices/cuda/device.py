"""The first CUDA device that the process sees, for encoders."""

from typing import Any, ClassVar

import torch

from services.vision_encoder.devices.base.accelerator import Accelerator
from services.vision_encoder.devices.base.ops import TowerOps
from shared import numerics


class CudaDevice(Accelerator):
    """Plain torch on the current stream."""

    name = "cuda"
    runtime: ClassVar[Any] = torch.cuda

    def numerics(self, uses_ops: bool) -> str:
        """The kind of GPU."""
        kind = torch.cuda.get_device_name()
        text = numerics.of_accelerator(self.name, kind)
        return numerics.varying(text) if uses_ops else text

    def _make_ops(self) -> TowerOps:
        self.where = torch.device("cuda", 0)  # `set_device` wants a number
        return super()._make_ops()
