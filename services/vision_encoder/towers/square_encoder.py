"""What encoders have in common whose pictures are all squares of one size."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.families.family import ItemSize
from services.vision_encoder.towers import pixel_values
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from services.vision_encoder.towers.native_encoder import NativeEncoder


class SquareEncoder(NativeEncoder):
    """Squares [channels, side, side] to rows, several at once. A family's class loads `_tower`."""

    stacked = True
    _patch: int  # edge in pixels
    _image_shape: tuple[int, int, int]
    _tower: Callable[
        [torch.Tensor], torch.Tensor
    ]  # squares to projected rows [n, rows, hidden_size]

    def cost(self, item: Item) -> int:
        """All images have one size. Raises BadPixels for another."""
        if item.pixels.shape != self._image_shape:
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}, the tower takes"
                f" {list(self._image_shape)}"
            )
        return (self._image_shape[1] // self._patch) ** 2

    def sample(self, size: ItemSize) -> Item:
        """A black image; all have one size."""
        return pixel_item(np.zeros(self._image_shape, np.float32))

    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        return list(self._tower(pixel_values.squares(items, self._device)))
