"""DeepSeek-VL2's views: the whole image in one square, and tiles of the best resolution.

Assumption: both are fitted with PIL's bicubic, centred on the mean colour (127, 127, 127), and
normalised by 0.5; the side is that of the first candidate resolution.
Assumption: the best resolution keeps most pixels (at most the image's own), then wastes least, then
comes first; more than two images in a prompt get one tile each.
"""

from collections.abc import Sequence

import torch
from PIL import ImageOps
from PIL.Image import Image, Resampling
from torch import Tensor

from tests.reference_models.towers import to_pixels

GREY = (127, 127, 127)
HALF = (0.5, 0.5, 0.5)
MOST_TILED = 2  # images of a prompt that are still cut into tiles
Resolutions = Sequence[Sequence[int]]


def tile_counts(width: int, height: int, candidates: Resolutions, images: int) -> tuple[int, int]:
    """(columns, rows) of tiles of an image in a prompt with so many."""
    side = candidates[0][0]
    if images > MOST_TILED:
        return 1, 1
    found: list[tuple[int, int, int, int]] = []
    for wide, high in candidates:
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        found.append((-kept, wide * high - kept, wide // side, high // side))
    best = min(found, key=lambda entry: entry[:2])
    return best[2], best[3]


def views(image: Image, candidates: Resolutions, images: int) -> tuple[Tensor, int, int]:
    """Pixels [1 + tiles, 3, side, side], global view first, and the columns and rows of tiles."""
    side, image = candidates[0][0], image.convert("RGB")
    columns, rows = tile_counts(*image.size, candidates, images)
    whole = fitted(image, side, side)
    fitted_tiles = fitted(image, columns * side, rows * side)
    tiles = [tile for row in fitted_tiles.split(side, dim=1) for tile in row.split(side, dim=2)]
    return torch.stack([whole, *tiles]), columns, rows


def fitted(image: Image, width: int, height: int) -> Tensor:
    """Pixels [3, height, width] of the image, as large as fits, on grey."""
    padded = ImageOps.pad(image, (width, height), Resampling.BICUBIC, GREY)
    return to_pixels(padded, HALF, HALF)
