"""Families by the architecture that config.json names. A new family is a file here and a line below."""

import importlib

import torch

from services.vision_encoder.models.vision_model import VisionModel
from shared.checkpoint import Checkpoint
from shared.errors import Unavailable

# Architecture -> (module, class); modules are imported when they are needed.
FAMILIES = {
    "LlavaForConditionalGeneration": (".llava", "LlavaVision"),
    "LlavaNextForConditionalGeneration": (".llava_next", "LlavaNextVision"),
    "Qwen2VLForConditionalGeneration": (".qwen2_vl", "Qwen2VLVision"),
    "Qwen2_5_VLForConditionalGeneration": (".qwen2_vl", "Qwen2_5VLVision"),
}


def load_vision_model(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> VisionModel | None:
    """The vision part of a checkpoint; None for a text-only model. Raises Unavailable for an unknown one."""
    family = FAMILIES.get(checkpoint.architecture)
    if family is None:
        if checkpoint.vision_config is None:
            return None
        raise Unavailable(
            "UNSUPPORTED_MODEL",
            f"{checkpoint.architecture} is not supported; these are: {', '.join(FAMILIES)}",
        )
    module, name = family
    model: VisionModel = getattr(importlib.import_module(module, __name__), name)(
        checkpoint, device, dtype
    )
    return model
