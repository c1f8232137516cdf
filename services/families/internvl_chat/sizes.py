"""Into how many tiles a picture of InternVL is cut, and how many rows they become."""

from dataclasses import dataclass
from typing import Any

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from tessera.common.v1.media_pb2 import Modality

# Means and deviations of ImageNet's pictures.
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
_BICUBIC = 3
_MARKS = 2  # tokens around a picture's rows


@dataclass(frozen=True)
class Tiling:
    """`side`: edge of a tile in pixels; `rows` of a tile; a picture has from `least` to `most` tiles, and one more of
    the whole picture where there are several."""

    side: int
    rows: int
    least: int
    most: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Tiling":
        """Raises InvalidRequest for options that are not served."""
        config, vision = checkpoint.config, checkpoint.vision_config or {}
        side, patch = int(vision.get("image_size") or 448), int(vision.get("patch_size") or 14)
        ratio = float(config.get("downsample_ratio") or 0.5)
        patches = side // patch
        if int(config.get("force_image_size") or side) != side:
            raise bad_option(checkpoint, "force_image_size is not the tower's image_size")
        if ratio <= 0 or 1 / ratio % 1 or patches % (1 / ratio):
            raise bad_option(
                checkpoint, f"downsample_ratio {ratio:g} does not divide {patches} patches"
            )
        # Keys that are left out have the values of the configuration's class.
        dynamic = bool(config.get("dynamic_image_size", False))
        if dynamic and not config.get("use_thumbnail", False):
            raise bad_option(checkpoint, "dynamic_image_size without use_thumbnail is not served")
        if config.get("pad2square"):
            raise bad_option(checkpoint, "pad2square is not served")
        least, most = (
            int(config.get(f"{bound}_dynamic_patch") or default) if dynamic else 1
            for bound, default in (("min", 1), ("max", 6))
        )
        if not 1 <= least <= most:
            raise bad_option(
                checkpoint, f"min_dynamic_patch {least} and max_dynamic_patch {most} are no range"
            )
        return cls(side, int(patches * ratio) ** 2, least, most)

    def tiles(self, width: int, height: int) -> int:
        """Of a picture of this many pixels, the whole one included."""
        columns, rows = self.grid(width, height)
        return columns * rows + (columns * rows > 1)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles: those nearest to the picture's shape; of equally near ones the last, ascending by
        their number, that the picture is large enough for (over half their pixels)."""
        best, least = (1, 1), float("inf")
        for columns, rows in self._grids():
            distance = abs(width / height - columns / rows)
            if distance < least:
                best, least = (columns, rows), distance
            elif distance == least and width * height > 0.5 * self.side**2 * columns * rows:
                best = (columns, rows)
        return best

    def largest(self) -> tuple[int, int]:
        """Columns and rows of the squarest grid that has most tiles."""
        return max(self._grids(), key=lambda grid: (grid[0] * grid[1], -abs(grid[0] - grid[1])))

    def _grids(self) -> list[tuple[int, int]]:
        edges = range(1, self.most + 1)
        grids = [(columns, rows) for columns in edges for rows in edges]
        fitting = [grid for grid in grids if self.least <= grid[0] * grid[1] <= self.most]
        return sorted(fitting, key=lambda grid: grid[0] * grid[1])


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`."""
    tiling = Tiling.read(checkpoint)
    columns, rows = tiling.largest()
    width, height = columns * tiling.side, rows * tiling.side
    return ItemSize(width, height, tokens=tiling.tiles(width, height) * tiling.rows + _MARKS)


def processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """See `Family.processor_config`: the folder's own file does not know of tiles."""
    tiling, stored = Tiling.read(checkpoint), checkpoint.image_processor_config
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": tiling.side, "width": tiling.side},
        "resample": _BICUBIC,
        "crop_to_patches": tiling.most > 1,
        "min_patches": tiling.least,
        "max_patches": tiling.most,
        "image_mean": list(stored.get("image_mean") or _MEAN),
        "image_std": list(stored.get("image_std") or _STD),
    }
