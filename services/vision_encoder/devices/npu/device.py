"""The first Ascend NPU that the process sees, for encoders."""

from typing import Any, ClassVar

import torch
import torch_npu

from services.vision_encoder.devices.base.accelerator import Accelerator
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.devices.npu.ops import NpuOps
from services.vision_encoder.devices.npu.ops_310p import Npu310POps
from shared import numerics
from shared.hardware.ascend import is_310p, npu_name


class NpuDevice(Accelerator):
    """Work runs on the current stream of each thread."""

    name = "npu"
    runtime: ClassVar[Any] = torch_npu.npu

    def numerics(self, uses_ops: bool) -> str:
        """The kind of NPU."""
        text = numerics.of_accelerator(self.name, npu_name())
        return numerics.varying(text) if uses_ops else text

    def _make_ops(self) -> TowerOps:
        self.where = torch.device("npu", 0)
        torch_npu.npu.set_device(self.where)
        if not is_310p():
            return NpuOps(self.where, self.dtype)
        torch_npu.npu.set_compile_mode(jit_compile=False)  # else each new shape is compiled
        return Npu310POps(self.where, self.dtype)
