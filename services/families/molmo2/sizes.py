"""How Molmo2 cuts pictures: as Molmo does, without keeping their shape, and with cells of any size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.families.family import ItemSize
from services.families.molmo.sizes import Cropping, Grid
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from tessera.common.v1.media_pb2 import Modality

_MARKS = 4  # tokens before and behind the whole picture, and before and behind its crops
_BILINEAR = 2
DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 378, "width": 378},
    "patch_size": 14,
    "max_crops": 8,
    "overlap_margins": [4, 4],
    "pooling_size": [2, 2],
    "resample": _BILINEAR,
    "do_rescale": True,
    "do_normalize": True,
}


@dataclass(frozen=True)
class Cells:
    """`pool`: patches of a cell, which is a token, along its height and width; those at the edges may have fewer."""

    cropping: Cropping
    pool: Grid

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Cells":
        """By preprocessor_config.json. Raises InvalidRequest for options that are not served."""
        stored = checkpoint.image_processor_config
        given = {**DEFAULTS, **{key: found for key, found in stored.items() if found is not None}}
        size, patch, (before, after) = given["size"], given["patch_size"], given["overlap_margins"]
        height = size["height"]
        served = {
            "size": height == size["width"] and height % patch == 0,
            "overlap_margins": before >= 0 and 0 <= after < height // patch - before,
            "max_crops": given["max_crops"] >= 1,
            "pooling_size": len(given["pooling_size"]) == 2 and min(given["pooling_size"]) >= 1,
            "resample": given["resample"] == _BILINEAR,
            "do_rescale": bool(given["do_rescale"]),
            "do_normalize": bool(given["do_normalize"]),
        }
        if wrong := [key for key, is_served in served.items() if not is_served]:
            raise bad_option(
                checkpoint,
                f"{wrong[0]} {given[wrong[0]]!r} is not served",
                "preprocessor_config.json",
            )
        rows, columns = given["pooling_size"]
        return cls(Cropping(height, patch, before, after, given["max_crops"]), (rows, columns))

    def pooled(self, grid: Grid) -> Grid:
        """Cells of so many patches."""
        return -(-grid[0] // self.pool[0]), -(-grid[1] // self.pool[1])

    def tokens(self, tiling: Grid) -> int:
        """Of a picture, with a token behind each of its lines: as many as it may have."""
        whole = (self.cropping.patches, self.cropping.patches)
        parts = [self.pooled(grid) for grid in (whole, self.cropping.grid(tiling))]
        return sum(rows * (columns + 1) for rows, columns in parts) + _MARKS


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`."""
    cells = Cells.read(checkpoint)
    tiling = max(cells.cropping.tilings, key=cells.tokens)
    height, width = (edge * cells.cropping.patch for edge in cells.cropping.grid(tiling))
    return ItemSize(width, height, tokens=cells.tokens(tiling))


def processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """See `Family.processor_config`: that of transformers needs torchvision."""
    Cells.read(checkpoint)
    own = "services.families.molmo2.image_processor:Molmo2ImageProcessor"
    return {**checkpoint.image_processor_config, "image_processor_type": own}
