"""WeMM's image processors: the 2K one, and stock Idefics2 for WeMM-Chat-CN and WeMM-1.2.

Assumption: pixels are resized by PIL as 8-bit RGB; 1/255 is multiplied in float64 and rounded to
float32, the normalisation is float32 (what transformers' processors of that time do).
"""

from collections.abc import Mapping

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor
from torch.nn import functional

Size = Mapping[str, int]
PATCH = 14


def resized(width: int, height: int, size: Size, stock: bool) -> tuple[int, int]:
    """(width, height) after resizing: the longer side becomes `longest_edge`, for stock only where
    it is longer; then no side is below `shortest_edge`.
    """
    longest, shortest = size["longest_edge"], size["shortest_edge"]
    ratio = width / height
    if not stock or max(width, height) > longest:
        if width >= height:
            width, height = longest, int(longest / ratio)
        else:
            width, height = int(longest * ratio), longest
    return max(width, shortest), max(height, shortest)


def grid(width: int, height: int, size: Size, stock: bool) -> tuple[int, int]:
    """(rows, columns) of patches: the 2K processor pads a partial patch, stock drops it."""
    width, height = resized(width, height, size, stock)
    if stock:
        return height // PATCH, width // PATCH
    return -(-height // PATCH), -(-width // PATCH)


def pixel_values(image: Image, size: Size, stock: bool) -> Tensor:
    """[3, H, W] float32. The 2K processor pads at the bottom and on the right to whole patches."""
    target = resized(*image.size, size, stock)
    shown = np.asarray(image.convert("RGB").resize(target, Resampling.BILINEAR))
    scaled = (shown.astype(np.float64) * (1 / 255)).astype(np.float32)
    half = np.float32(0.5)
    pixels = torch.from_numpy((scaled - half) / half).permute(2, 0, 1)
    if stock:
        return pixels
    return functional.pad(pixels, (0, -target[0] % PATCH, 0, -target[1] % PATCH))
