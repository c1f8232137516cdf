"""What a model family gives to the encoder: a tower with its projector, loaded and ready."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from shared.artifacts.pixel_scaling import PixelScaling

PixelArray = npt.NDArray[np.generic]


class BadPixels(ValueError):
    """Pixel values of a shape that this tower does not take, or that is not what the prompt says."""


@dataclass(frozen=True)
class VisionItem:
    """One media item: its pixel values, float32 or bytes, and what the prompt says of it (zeros: nothing)."""

    pixels: PixelArray
    grid: tuple[int, int, int] = (0, 0, 0)  # patches: time, rows, columns
    height: int = 0  # of the picture before it was processed
    width: int = 0
    scaling: PixelScaling | None = None  # what makes values of pixels that are bytes


class VisionModel(Protocol):
    """Pixel values in, embedding rows out. Used by one thread at a time.

    `stacked` families run items of equal shape together; the others, packed, run any together.
    """

    stacked: bool
    hidden_size: int
    on_kernels: bool  # whose own threads compute; torch needs but one then
    dtype: torch.dtype

    def patches(self, item: VisionItem) -> int:
        """Patches that the tower looks at. Raises BadPixels for what is no item of this model."""

    def encode(self, items: Sequence[VisionItem]) -> list[torch.Tensor]:
        """Embedding rows [rows, hidden_size] of each item, in order, on the CPU."""

    def sample(self) -> VisionItem:
        """An item to warm up with."""


def to_array(embedding: torch.Tensor) -> tuple[npt.NDArray[Any], str]:
    """A tensor's elements and their name; numpy has no bfloat16, so these are its 16 bits."""
    embedding = embedding.contiguous()
    if embedding.dtype == torch.bfloat16:
        return embedding.view(torch.uint16).numpy(), "bfloat16"
    array: npt.NDArray[Any] = embedding.numpy()
    return array, str(array.dtype)
