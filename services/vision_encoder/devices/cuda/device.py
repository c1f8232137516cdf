"""The first CUDA device that the process sees, for encoders."""

import torch

from services.vision_encoder.devices.base.device import Accelerator


class CudaDevice(Accelerator):
    """Plain torch on the current stream."""

    name = "cuda"

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self.where)
