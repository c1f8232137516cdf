"""The first CUDA device that the process sees, for encoders."""

from typing import Any, ClassVar

import torch

from services.vision_encoder.devices.base.accelerator import Accelerator


class CudaDevice(Accelerator):
    """Plain torch on the current stream."""

    name = "cuda"
    runtime: ClassVar[Any] = torch.cuda
