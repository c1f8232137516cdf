"""How Molmo cuts pictures: the whole one, and overlapping crops of it at a larger size, pooled by squares of patches.

Edges are in pixels, in patches or in cells of POOL x POOL patches. Sizes are computed in float32 as the released
processor does; they have edges.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from tessera.common.v1.media_pb2 import Modality

POOL = 2
Grid = tuple[int, int]  # rows, columns
# Means and deviations of CLIP's pictures.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_DEFAULTS: dict[str, Any] = {
    "base_image_input_size": [336, 336],
    "image_patch_size": 14,
    "image_token_length_h": 12,
    "image_token_length_w": 12,
    "max_crops": 12,
    "overlap_margins": [4, 4],
    "image_padding_mask": True,
    "do_normalize": True,
}


@dataclass(frozen=True)
class Cropping:
    """`side`: edge of a view in pixels; `before`, `after`: patches of a crop that it leaves to its neighbour there."""

    side: int
    patch: int
    before: int
    after: int
    most: int  # crops of a picture

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Cropping":
        """By preprocessor_config.json, or as released without one. Raises InvalidRequest for options not served."""
        given = {**_DEFAULTS, **checkpoint.image_processor_config}
        height, width = given["base_image_input_size"]
        patch, (before, after) = int(given["image_patch_size"]), given["overlap_margins"]
        patches = height // patch
        cells = -(-patches // POOL)
        asked = {
            "base_image_input_size": height == width and height % (POOL * patch) == 0,
            "overlap_margins": not (before % POOL or after % POOL) and before + after < patches,
            "image_token_length_h": given["image_token_length_h"] == cells,
            "image_token_length_w": given["image_token_length_w"] == cells,
            "max_crops": given["max_crops"] >= 1,
            "image_padding_mask": bool(given["image_padding_mask"]),
            "do_normalize": bool(given["do_normalize"]),
        }
        if wrong := [key for key, served in asked.items() if not served]:
            raise bad_option(
                checkpoint,
                f"{wrong[0]} {given[wrong[0]]!r} is not served",
                "preprocessor_config.json",
            )
        return cls(height, patch, int(before), int(after), int(given["max_crops"]))

    @property
    def patches(self) -> int:
        """Along an edge of a view."""
        return self.side // self.patch

    @property
    def cells(self) -> int:
        """Along an edge of a view."""
        return self.patches // POOL

    @property
    def window(self) -> int:
        """Patches along an edge of a crop that no neighbour has."""
        return self.patches - self.before - self.after

    @cached_property
    def tilings(self) -> list[Grid]:
        """Ascending by the number of crops, then by rows."""
        edges = range(1, self.most + 1)
        grids = [(rows, columns) for rows in edges for columns in edges]
        fitting = [grid for grid in grids if grid[0] * grid[1] <= self.most]
        return sorted(fitting, key=lambda grid: (grid[0] * grid[1], grid[0]))

    def tiling(self, width: int, height: int) -> Grid:
        """Crops of a picture of so many pixels: those that enlarge it least; where all are too small for it, those that
        shrink it least; of equal ones the first."""
        margins = (self.before + self.after) * self.patch
        size = np.array([height - margins, width - margins], np.float32)
        wanted = np.array(self.tilings, np.float32) * np.float32(self.window * self.patch)
        with np.errstate(divide="ignore"):
            scales = (wanted / size).min(-1)
        if (scales < 1).all():
            return self.tilings[int(scales.argmax())]
        return self.tilings[int(np.where(scales < 1, np.inf, scales).argmin())]

    def grid(self, tiling: Grid) -> Grid:
        """Patches of all crops together."""
        rows, columns = (count * self.window + self.before + self.after for count in tiling)
        return rows, columns

    def lines(self, width: int, height: int) -> list[Grid]:
        """Cells of the whole picture and of its crops, for a picture of so many pixels."""
        rows, columns = self.grid(self.tiling(width, height))
        return [(self.cells, self.cells), (rows // POOL, columns // POOL)]

    def tokens(self, width: int, height: int) -> int:
        """A token for each cell, one behind each line, and a mark at both ends of both parts."""
        return sum(rows * (columns + 1) + 2 for rows, columns in self.lines(width, height))

    def places(self, tiling: Grid) -> npt.NDArray[np.int64]:
        """Of each cell of all crops together, line by line, its place among the cells of all crops, one after the
        other. Of two crops with the same cell it is the one that is not at its margin."""
        (row, y), (column, x) = (self._owners(count) for count in tiling)
        crop = row[:, None] * tiling[1] + column
        found: npt.NDArray[np.int64] = (crop * self.cells + y[:, None]) * self.cells + x
        return found.ravel()

    def _owners(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Along an edge of `count` crops: each cell's crop, and its place there."""
        step = self.window // POOL
        cells = np.arange(count * step + (self.before + self.after) // POOL)
        crop = ((cells - self.before // POOL) // step).clip(0, count - 1)
        return crop, cells - crop * step


@dataclass(frozen=True)
class Fitting:
    """A picture of `width` x `height` pixels in the middle of a black one, as large as its shape allows. Sizes are
    (height, width) in pixels."""

    inner: Grid
    outer: Grid

    @classmethod
    def of(cls, width: int, height: int, outer: Grid) -> "Fitting":
        """Of a picture into `outer`."""
        size = np.array([height, width], np.float32)
        scale = (np.array(outer, np.float32) / size).min()
        rows, columns = (int(edge) for edge in size * scale)
        return cls((rows, columns), outer)

    @property
    def start(self) -> Grid:
        """Where its first pixel is."""
        return (self.outer[0] - self.inner[0]) // 2, (self.outer[1] - self.inner[1]) // 2

    def shown(self, patch: int) -> npt.NDArray[np.int64]:
        """Pixels of each patch [rows, columns] that belong to the picture."""
        covered = []
        for first, count, edge in zip(self.start, self.inner, self.outer, strict=True):
            inside = np.zeros(edge, np.int64)
            inside[first : first + count] = 1
            covered.append(inside.reshape(-1, patch).sum(1))
        return np.outer(*covered)


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`."""
    cropping = Cropping.read(checkpoint)
    sizes = []
    for tiling in cropping.tilings:
        height, width = (edge * cropping.patch for edge in cropping.grid(tiling))
        sizes.append(ItemSize(width, height, tokens=cropping.tokens(width, height)))
    return max(sizes, key=lambda size: size.tokens)


def processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """See `Family.processor_config`."""
    stored = checkpoint.image_processor_config
    cropping = Cropping.read(checkpoint)
    return {
        "image_processor_type": "services.families.molmo.image_processor:MolmoImageProcessor",
        # The released processor turns a copy upright and does not use it.
        "upright": False,
        "side": cropping.side,
        "patch": cropping.patch,
        "before": cropping.before,
        "after": cropping.after,
        "most": cropping.most,
        "image_mean": list(stored.get("image_mean") or _MEAN),
        "image_std": list(stored.get("image_std") or _STD),
    }
