"""The encoder of a checkpoint, loaded and ready."""

import torch

from services.families import registry
from services.families.family import load_part
from services.vision_encoder.devices import load_tower_ops
from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.towers.encoder import Encoder
from shared.checkpoint.folder import Checkpoint


def load_encoder(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    threads: int = 1,
    ops: TowerOps | None = None,
) -> Encoder | None:
    """The encoder of a checkpoint's family; None for a text-only model. Raises InvalidRequest for what is not served.

    threads: of our own kernels, which do the work on a CPU where they can be had. ops: these kernels, where the caller
    has them already.
    """
    family = registry.find(checkpoint)
    if not family.takes_media:
        return None
    encoder: Encoder = load_part(family.encoder)(
        checkpoint, device, dtype, ops or load_tower_ops(device, dtype, threads)
    )
    return encoder
