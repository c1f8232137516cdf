"""Families by the architecture that config.json names. A new family is a file here and a line below."""

import importlib

import torch

from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.models.vision_model import VisionModel
from shared.checkpoint.folder import Checkpoint
from shared.cpu_kernels.binding import load_kernels
from shared.cpu_kernels.packed_linear import TYPES
from shared.model_config.families import has_vision

# Architecture -> (module, class); modules are imported when they are needed.
FAMILIES = {
    "LlavaForConditionalGeneration": (".llava", "LlavaVision"),
    "LlavaNextForConditionalGeneration": (".llava_next", "LlavaNextVision"),
    "Qwen2VLForConditionalGeneration": (".qwen2_vl", "Qwen2VLVision"),
    "Qwen2_5_VLForConditionalGeneration": (".qwen2_vl", "Qwen2_5VLVision"),
}


def load_vision_model(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, threads: int = 1
) -> VisionModel | None:
    """The vision part of a checkpoint; None for a text-only model. Raises InvalidRequest for an unknown one.

    threads: of our own kernels, which do the work on a CPU where they can be had.
    """
    if not has_vision(checkpoint):
        return None
    module, name = FAMILIES[checkpoint.architecture]
    model: VisionModel = getattr(importlib.import_module(module, __name__), name)(
        checkpoint, device, dtype, _ops(device, dtype, threads)
    )
    return model


def _ops(device: torch.device, dtype: torch.dtype, threads: int) -> TowerOps | None:
    fitting = device.type == "cpu" and dtype in TYPES
    kernels = load_kernels(threads) if fitting else None
    return TowerOps(kernels, dtype) if kernels is not None else None
