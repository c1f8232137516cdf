"""Molmo's crops: a padded image in overlapping squares of 336, and the whole image as one more.

Neighbouring squares share 8 patches, 4 of each are left out: 16 of 24 are used, at an outer edge 20.

Assumption: at most 12 crops, margins of 4 patches on each side, 12 x 12 tokens a crop, as released.
Assumption: resizing is torch's antialiased bilinear on [0, 1] float32 pixels; black fills the rest,
the image in its middle, before CLIP's normalisation.
Assumption: of image_masks the global view has no row of its own: the crops' rows come first and -1
follows them, so that the global view is masked like the first crop, each crop like the next, and
the last crop is partial everywhere (what the released processor returns).
"""

from dataclasses import dataclass

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional

from tests.reference_models.towers import CLIP_MEAN, CLIP_STD

SIDE, PATCH = 336, 14
GRID = SIDE // PATCH  # patches a side
MARGIN = 4  # patches left out at an inner edge
WINDOW = GRID - 2 * MARGIN  # patches a side that only one crop has
TOKENS = GRID // 2  # a side, after pooling
MAX_CROPS = 12


@dataclass(frozen=True)
class Crops:
    """patches [crops, 576, 588], global view first; masks [crops, 576]; order [crops * 144]: the
    place among the image's patch tokens, or -1; tiling: rows and columns of crops.
    """

    patches: Tensor
    masks: Tensor
    order: Tensor
    tiling: tuple[int, int]


def select_tiling(width: int, height: int) -> tuple[int, int]:
    """(rows, columns) of crops: least enlargement, else least reduction; ties go to fewer crops."""
    tilings = sorted(
        (
            (rows, columns)
            for rows in range(1, MAX_CROPS + 1)
            for columns in range(1, MAX_CROPS + 1)
            if rows * columns <= MAX_CROPS
        ),
        key=lambda tiling: (tiling[0] * tiling[1], tiling[0]),
    )
    margins = 2 * MARGIN * PATCH
    inner = np.array([height - margins, width - margins], np.float32)
    with np.errstate(divide="ignore"):
        scales = (np.array(tilings) * WINDOW * PATCH).astype(np.float32) / inner
    required = scales.min(axis=1)
    if (required < 1).all():
        return tilings[int(required.argmax())]
    return tilings[int(np.where(required < 1, 1e10, required).argmin())]


def padded_size(tiling: tuple[int, int]) -> tuple[int, int]:
    """(height, width) in pixels of the image that is cut into so many crops."""
    height, width = ((count * WINDOW + 2 * MARGIN) * PATCH for count in tiling)
    return height, width


def token_grid(tiling: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patch tokens of all crops together."""
    rows, columns = ((count * WINDOW + 2 * MARGIN) // 2 for count in tiling)
    return rows, columns


def resize_and_pad(image: Image, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Normalised pixels [3, height, width], and a mask [height, width] that is 1 on the image."""
    own_height, own_width = np.float32(image.height), np.float32(image.width)
    scale = min(np.float32(height) / own_height, np.float32(width) / own_width)
    inner_height, inner_width = int(own_height * scale), int(own_width * scale)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
    scaled = functional.interpolate(
        pixels, size=(inner_height, inner_width), mode="bilinear", antialias=True
    )[0].clamp(0, 1)
    above, left = (height - inner_height) // 2, (width - inner_width) // 2
    sides = (left, width - inner_width - left, above, height - inner_height - above)
    mean, std = torch.tensor(CLIP_MEAN)[:, None, None], torch.tensor(CLIP_STD)[:, None, None]
    mask = functional.pad(torch.ones(inner_height, inner_width), sides)
    return (functional.pad(scaled, sides) - mean) / std, mask


def cut(pixels: Tensor) -> Tensor:
    """Pixels [c, 336, 336] as patches [576, 14 * 14 * c], channels last."""
    cells = pixels.reshape(-1, GRID, PATCH, GRID, PATCH)
    return cells.permute(1, 3, 2, 4, 0).reshape(GRID * GRID, -1)


def crops(image: Image) -> Crops:
    """All crops of an image."""
    image = image.convert("RGB")
    tiling = select_tiling(*image.size)
    pixels, mask = resize_and_pad(image, *padded_size(tiling))
    view, _ = resize_and_pad(image, SIDE, SIDE)
    patches, masks, order = [cut(view)], [], [torch.arange(TOKENS**2)]
    _, columns = token_grid(tiling)
    for row in range(tiling[0]):
        for column in range(tiling[1]):
            top, left = row * WINDOW * PATCH, column * WINDOW * PATCH
            window = (slice(top, top + SIDE), slice(left, left + SIDE))
            patches.append(cut(pixels[:, *window]))
            masks.append(cut(mask[None, *window]).mean(-1))
            down = used(row, tiling[0])
            across = used(column, tiling[1])
            places = (torch.arange(TOKENS) + row * WINDOW // 2)[:, None] * columns
            places = places + torch.arange(TOKENS) + column * WINDOW // 2
            kept = down[:, None] & across
            order.append(torch.where(kept, places + TOKENS**2, -1).flatten())
    masks.append(torch.full((GRID**2,), -1.0))
    return Crops(torch.stack(patches), torch.stack(masks), torch.cat(order), tiling)


def used(place: int, count: int) -> Tensor:
    """[12]: which tokens of a crop's side are its own, for crop `place` of `count` in that direction."""
    tokens = torch.arange(TOKENS)
    first = 0 if place == 0 else MARGIN // 2
    last = TOKENS if place == count - 1 else TOKENS - MARGIN // 2
    return (tokens >= first) & (tokens < last)
