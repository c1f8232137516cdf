"""What a model family gives to this service: a tower with its projector, loaded and ready."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.families.family import ItemSize
from shared.artifacts.pixel_scaling import PixelScaling
from tessera.common.v1.media_pb2 import Modality

PixelArray = npt.NDArray[np.generic]
PIXEL_VALUES = "pixel_values"


class BadPixels(ValueError):
    """Pixel values of a shape that this tower does not take, or that is not what the prompt says."""


@dataclass(frozen=True)
class Item:
    """One media item: what its processor made of it, float32 or bytes, by transformers' names, and what the prompt says
    of it (zeros: nothing)."""

    tensors: Mapping[str, PixelArray]
    grid: tuple[int, int, int] = (0, 0, 0)  # patches: time, rows, columns
    height: int = 0  # of the picture before it was processed
    width: int = 0
    scaling: PixelScaling | None = None  # what makes values of pixels that are bytes
    modality: Modality.ValueType = Modality.MODALITY_IMAGE

    @property
    def pixels(self) -> PixelArray:
        """Its `pixel_values`."""
        return self.tensors[PIXEL_VALUES]


def pixel_item(
    pixels: PixelArray,
    grid: tuple[int, int, int] = (0, 0, 0),
    height: int = 0,
    width: int = 0,
    scaling: PixelScaling | None = None,
    modality: Modality.ValueType = Modality.MODALITY_IMAGE,
) -> Item:
    """An item that is its pixel values alone."""
    return Item({PIXEL_VALUES: pixels}, grid, height, width, scaling, modality)


class Encoder(Protocol):
    """Tensors of items in, embedding rows out. Used by one thread at a time.

    A family's class is made of (checkpoint, device). `stacked` families run items of one modality and shape
    together; the others, packed, run any together.
    """

    stacked: bool
    hidden_size: int
    uses_ops: bool  # the device's operations do the work, not modules of torch
    dtype: torch.dtype

    def cost(self, item: Item) -> int:
        """Patches that the tower looks at. Raises BadPixels for what is no item of this model."""

    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Embedding rows [rows, hidden_size] of each item, in order, on the host."""

    def sample(self, size: ItemSize) -> Item:
        """A black item of this size, as preprocess would send it."""


def to_array(embedding: torch.Tensor) -> tuple[npt.NDArray[Any], str]:
    """A tensor's elements and their name; numpy has no bfloat16, so these are its 16 bits."""
    embedding = embedding.contiguous()
    if embedding.dtype == torch.bfloat16:
        return embedding.view(torch.uint16).numpy(), "bfloat16"
    array: npt.NDArray[Any] = embedding.numpy()
    return array, str(array.dtype)
