"""The encoder of a checkpoint, loaded and ready."""

from services.families import registry
from services.families.family import load_part
from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.towers.encoder import Encoder
from shared.checkpoint.folder import Checkpoint


def load_encoder(checkpoint: Checkpoint, device: Device) -> Encoder | None:
    """The encoder of a checkpoint's family; None for a text-only model. Raises InvalidRequest where none is served."""
    family = registry.find(checkpoint)
    if not family.takes_media:
        return None
    encoder: Encoder = load_part(family.encoder)(checkpoint, device)
    return encoder
