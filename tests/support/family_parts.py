"""The parts of a checkpoint's family, as services load them."""

from pathlib import Path

import torch

from services.families import registry
from services.families.family import load_part
from services.preprocess.prompt.prompt_rule import ImageProcessing, PromptRule
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import Encoder
from shared.checkpoint.folder import Checkpoint


def rule_of(folder: Path) -> PromptRule:
    """The prompt rule of a family that needs to know nothing of its image processor."""
    checkpoint = Checkpoint(folder)
    rule: PromptRule = load_part(registry.find(checkpoint).prompt)(checkpoint, ImageProcessing())
    return rule


def encoder_of(checkpoint: Checkpoint) -> Encoder:
    """The encoder on the CPU, in float32."""
    encoder = load_encoder(checkpoint, CpuDevice(torch.float32))
    assert encoder is not None
    return encoder
