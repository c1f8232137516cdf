"""How large pictures of Llama 3.2 Vision are: as tiles, and as rows that layers attend to."""

from typing import Any

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import read_whole
from tessera.common.v1.media_pb2 import Modality

# Of `MllamaVisionConfig`.
_DEFAULTS = {"image_size": 448, "patch_size": 14, "max_num_tiles": 4}


def most_tiles(checkpoint: Checkpoint) -> int:
    """Tiles of a picture at the most."""
    return _whole(checkpoint, "max_num_tiles")


def tile_rows(checkpoint: Checkpoint) -> int:
    """Rows of a tile: one for each patch, and that of the class token."""
    return (_whole(checkpoint, "image_size") // _whole(checkpoint, "patch_size")) ** 2 + 1


def item_rows(checkpoint: Checkpoint) -> int:
    """Rows of any picture, those of tiles that it does not fill included: text before the first picture attends to
    these too."""
    return most_tiles(checkpoint) * tile_rows(checkpoint)


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`: every picture is one token. As many tiles as there may be, one below the other."""
    side = _whole(checkpoint, "image_size")
    return ItemSize(side, side * most_tiles(checkpoint), tokens=1)


def _whole(checkpoint: Checkpoint, key: str) -> int:
    vision: Any = checkpoint.vision_config or {}
    return read_whole(checkpoint, key, vision.get(key, _DEFAULTS[key]))
