"""How large pictures of LLaVA-NeXT are, as squares and as rows.

Resolutions are (height, width) in pixels. Numbers are rounded as transformers does, on whose numbers the models were
trained.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.families.family import ItemSize
from services.families.llava.sizes import square_rows
from shared.checkpoint.folder import Checkpoint
from shared.model_config.llava import LlavaConfig
from tessera.common.v1.media_pb2 import Modality

Resolution = tuple[int, int]
_DEFAULT = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`: a picture that fills one of the resolutions."""
    config = LlavaConfig.read(checkpoint)
    side = config.tower.image_size // config.tower.patch_size

    def tokens(resolution: Resolution) -> int:
        down, across = (edge // config.tower.image_size * side for edge in resolution)
        return square_rows(config) + down * (across + 1)

    height, width = best = max(resolutions(checkpoint.config), key=tokens)
    return ItemSize(width, height, tokens=tokens(best))


def resolutions(settings: Mapping[str, Any]) -> list[Resolution]:
    """Those that config.json or the image processor names."""
    named = settings.get("image_grid_pinpoints") or _DEFAULT
    return [(int(height), int(width)) for height, width in named]


def best_resolution(width: int, height: int, known: Sequence[Resolution]) -> Resolution:
    """The one that keeps most pixels of a picture, and of those the one that wastes least."""

    def merit(resolution: Resolution) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(known, key=merit)


def padding(width: int, height: int, down: int, across: int) -> tuple[int, int]:
    """Of a picture's map of down x across patches: lines of padding on each side, and the axis they are counted on."""
    if width / height > across / down:
        return (down - int(round(height * (across / width), 7))) // 2, 0
    return (across - int(round(width * (down / height), 7))) // 2, 1
