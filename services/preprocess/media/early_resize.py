"""Resizes a picture before the image processor does, where the pixel values stay bit-equal.

The processors of transformers resize by Pillow, but carry the whole picture to numpy and back first:
for a photo of twelve megapixels as much work as two thirds of the resizing. Where resizing is the first
thing they do, by the same call to the same size, theirs then finds nothing left to do.
"""

import sys
from typing import Any

import numpy as np
import PIL.Image


def target_size(processor: Any, width: int, height: int) -> tuple[int, int] | None:
    """Width and height to which `processor` resizes a picture first; None where that is not known.

    Also None where a picture of that size would be resized once more, or where it is cut into tiles.
    """
    tiled = getattr(processor, "crop_to_patches", False)
    tiled = tiled or getattr(processor, "image_grid_pinpoints", None) is not None
    if tiled or not processor.do_resize:
        return None
    found = _resized(processor, width, height)
    if found is None or _resized(processor, *found) != found:
        return None
    return found


def resize(processor: Any, image: PIL.Image.Image) -> PIL.Image.Image:
    """The picture as the processor would resize it, or itself."""
    size = target_size(processor, *image.size)
    if size is None or size == image.size:
        return image
    return image.resize(size, resample=processor.resample)


def _resized(processor: Any, width: int, height: int) -> tuple[int, int] | None:
    size = {key: value for key, value in dict(processor.size).items() if value is not None}
    if size.keys() == {"height", "width"}:
        return size["width"], size["height"]
    if size.keys() == {"shortest_edge"}:
        from transformers.image_transforms import get_resize_output_image_size

        shape = np.broadcast_to(np.uint8(0), (3, height, width))
        rows, columns = get_resize_output_image_size(
            shape,
            size["shortest_edge"],
            default_to_square=False,
            input_data_format="channels_first",
        )
        return columns, rows
    smart_resize = getattr(sys.modules[type(processor).__module__], "smart_resize", None)
    if size.keys() == {"shortest_edge", "longest_edge"} and smart_resize is not None:
        rows, columns = smart_resize(
            height,
            width,
            factor=processor.patch_size * processor.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )
        return columns, rows
    return None
