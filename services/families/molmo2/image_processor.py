"""Molmo2's image processor, without torch: the whole picture and overlapping crops of it, as rows of patches.

The numbers are those of transformers' class bit for bit, down to the order in which torch adds four weighted pixels in
one thread. With several it takes another order: one byte in thousands differs by one.
"""

from typing import Any

import numpy as np
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, SizeDict
from transformers.processing_utils import ImagesKwargs

from services.families.molmo.sizes import Cropping, Grid
from services.families.molmo2.sizes import DEFAULTS, Cells

Array = np.ndarray[Any, np.dtype[Any]]
_BAND = 64  # rows that are resized at a time: wide enough for numpy, small enough for caches


class Molmo2ImagesKwargs(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    """What beside the usual options a call may give; see `Cells`."""

    max_crops: int
    overlap_margins: list[int]
    patch_size: int
    pooling_size: list[int]


class Molmo2ImageProcessor(PilBackend):  # type: ignore[misc]
    """Called as the image processors of transformers."""

    valid_kwargs = Molmo2ImagesKwargs
    model_input_names = (
        "pixel_values", "image_token_pooling", "image_grids", "image_num_crops"
    )  # fmt: skip
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    do_resize = do_convert_rgb = True
    size, resample = DEFAULTS["size"], DEFAULTS["resample"]
    do_rescale, do_normalize = DEFAULTS["do_rescale"], DEFAULTS["do_normalize"]
    max_crops, overlap_margins = DEFAULTS["max_crops"], DEFAULTS["overlap_margins"]
    patch_size, pooling_size = DEFAULTS["patch_size"], DEFAULTS["pooling_size"]

    def _preprocess(
        self,
        images: list[Array],
        size: SizeDict,
        patch_size: int,
        max_crops: int,
        overlap_margins: list[int],
        pooling_size: list[int],
        rescale_factor: float,
        image_mean: list[float],
        image_std: list[float],
        return_tensors: str | None,
        **_: Any,
    ) -> BatchFeature:
        """Of pictures uint8 [3, height, width], one after the other: `pixel_values` float32 [views, patches, values],
        `image_token_pooling` int32 [cells, patches of a cell], which of all patches each token is made of, -1 for none,
        `image_grids` int64 [pictures, 4], rows and columns of cells of the whole picture and of its crops, and
        `image_num_crops` int64 [pictures], views of each."""
        (before, after), (rows, columns) = overlap_margins, pooling_size
        cells = Cells(Cropping(size.height, patch_size, before, after, max_crops), (rows, columns))
        table = _normalized(rescale_factor, image_mean, image_std)
        pixels, pooling, grids, counts, known = [], [], [], [], 0
        for image in images:
            tiling = cells.cropping.tiling(image.shape[2], image.shape[1])
            views = [
                table[np.arange(len(image)), view] for view in _views(image, tiling, cells.cropping)
            ]
            pixels.append(np.stack([_patches(view, patch_size) for view in views]))
            found, grid = _pooling(tiling, cells)
            pooling.append(np.where(found < 0, found, found + known))
            grids.append(grid)
            counts.append(len(views))
            known += len(views) * cells.cropping.patches**2
        data = {
            "pixel_values": np.concatenate(pixels),
            "image_token_pooling": np.concatenate(pooling).astype(np.int32),
            "image_grids": np.array(grids, np.int64),
            "image_num_crops": np.array(counts, np.int64),
        }
        return BatchFeature(data, tensor_type=return_tensors)


def _views(image: Array, tiling: Grid, cropping: Cropping) -> list[Array]:
    """uint8 [side, side, 3]: of the whole picture, and of each of its crops."""
    picture, side = np.ascontiguousarray(image.transpose(1, 2, 0)), cropping.side
    height, width = (edge * cropping.patch for edge in cropping.grid(tiling))
    large, step = resize(picture, height, width), cropping.window * cropping.patch
    corners = [(top * step, left * step) for top in range(tiling[0]) for left in range(tiling[1])]
    crops = [large[top : top + side, left : left + side] for top, left in corners]
    return [resize(picture, side, side), *crops]


def _normalized(factor: float, mean: list[float], deviation: list[float]) -> Array:
    """float32 [channels, 256]: of each byte its value."""
    whole = np.float32(1.0 / factor)
    means, deviations = (np.array(x, np.float32)[:, None] * whole for x in (mean, deviation))
    values: Array = (np.arange(256, dtype=np.float32) - means) / deviations
    return values


def _patches(view: Array, patch: int) -> Array:
    """[patches, values] of a view [side, side, channels]: a patch's pixels row by row, of each its channels."""
    count = len(view) // patch
    apart = view.reshape(count, patch, count, patch, -1).transpose(0, 2, 1, 3, 4)
    rows: Array = apart.reshape(count * count, -1)
    return rows


def _pooling(tiling: Grid, cells: Cells) -> tuple[Array, list[int]]:
    """Of each cell the patches that it is made of, those of the whole picture before those of all crops, and how many
    rows and columns of cells both have."""
    count = cells.cropping.patches
    whole = np.arange(count * count).reshape(count, count)
    parts = [whole, _owners(tiling, cells.cropping) + count * count]
    grids = [edge for part in parts for edge in cells.pooled(part.shape)]
    return np.concatenate([_cells(part, cells.pool) for part in parts]), grids


def _owners(tiling: Grid, cropping: Cropping) -> Array:
    """Of each patch [rows, columns] of all crops together its number among the patches of all crops. Of two crops that
    have it, it is the one at whose margin it is not."""
    (row, y), (column, x) = (_along(count, cropping) for count in tiling)
    crop = row[:, None] * tiling[1] + column
    found: Array = (crop * cropping.patches + y[:, None]) * cropping.patches + x
    return found


def _along(count: int, cropping: Cropping) -> tuple[Array, Array]:
    """Along an edge of `count` crops: each patch's crop, and its place there."""
    patches = np.arange(count * cropping.window + cropping.before + cropping.after)
    crop = ((patches - cropping.before) // cropping.window).clip(0, count - 1)
    return crop, patches - crop * cropping.window


def _cells(patches: Array, pool: Grid) -> Array:
    """[cells, patches of one] of [rows, columns]; what is missing to whole cells is -1 on both sides."""
    missing = [-edge % size for edge, size in zip(patches.shape, pool, strict=True)]
    padded = np.pad(patches, [(n // 2, n - n // 2) for n in missing], constant_values=-1)
    apart = padded.reshape(padded.shape[0] // pool[0], pool[0], -1, pool[1])
    found: Array = apart.transpose(0, 2, 1, 3).reshape(-1, pool[0] * pool[1])
    return found


def resize(picture: Array, height: int, width: int) -> Array:
    """uint8 [height, width, channels] of a picture [rows, columns, channels]: bilinear between the nearest four pixels,
    whatever the scale (no antialias)."""
    y, x = _neighbours(picture.shape[0], height), _neighbours(picture.shape[1], width)
    found: Array = np.empty((height, width, picture.shape[2]), np.uint8)
    for top in range(0, height, _BAND):
        band = slice(top, top + _BAND)
        found[band] = _between(picture, [(at[band], weight[band]) for at, weight in y], x)
    return found


def _neighbours(pixels: int, wanted: int) -> list[tuple[Array, Array]]:
    """Of each of `wanted` pixels the one before and the one behind it among `pixels`, with their weights (float32)."""
    scale = np.float64(np.float32(pixels) / np.float32(wanted))
    place = ((np.arange(wanted) + 0.5) * scale - 0.5).astype(np.float32).clip(0)
    before = place.astype(np.int64)
    weight = place - before.astype(np.float32)
    return [(before, 1 - weight), ((before + 1).clip(max=pixels - 1), weight)]


def _between(picture: Array, y: list[tuple[Array, Array]], x: list[tuple[Array, Array]]) -> Array:
    """Bytes of a band of rows. Sums are rounded after each pixel, products are not (fused multiply-add)."""
    total: Array = np.zeros((), np.float32)
    for row, column in ((0, 1), (0, 0), (1, 0), (1, 1)):
        (at_y, weight_y), (at_x, weight_x) = y[row], x[column]
        pixels = picture[at_y][:, at_x].astype(np.float64)
        weights = (weight_y[:, None] * weight_x)[..., None]
        total = (pixels * weights + total).astype(np.float32)
    found: Array = total.round().clip(0, 255).astype(np.uint8)
    return found
