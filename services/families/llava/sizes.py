"""How large images of LLaVA 1.5 are: all have one size."""

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from shared.model_config.llava import LlavaConfig
from tessera.common.v1.media_pb2 import Modality


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`."""
    config = LlavaConfig.read(checkpoint)
    side = config.tower.image_size
    return ItemSize(side, side, tokens=square_rows(config))


def square_rows(config: LlavaConfig) -> int:
    """Embedding rows of one square: its patches, and the tower's class token unless it is left out."""
    side = config.tower.image_size // config.tower.patch_size
    return side**2 + config.tower.is_clip - config.drops_first
