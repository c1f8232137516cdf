"""LLaVA-NeXT (Liu et al., 2024): the whole picture as one square, then the same larger, cut into squares.

The squares' rows are put together as one map, what was padding is cut off, and each line of the map
ends with the row `image_newline`. Pixel values are [1 + squares, channels, side, side].
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from services.families.family import ItemSize
from services.families.llava.encoder import LlavaEncoder
from services.families.llava_next.sizes import best_resolution, padding, resolutions
from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from services.vision_encoder.towers.llava_network import LlavaNetwork
from shared.checkpoint.folder import Checkpoint
from shared.model_config.llava import LlavaConfig


class _Network(LlavaNetwork):
    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        self.newline = nn.Parameter(torch.empty(config.text_size))


class LlavaNextEncoder(LlavaEncoder):
    """Tower, projector and newline of one checkpoint. All squares are of one size: any may run together."""

    stacked = False
    network_class: ClassVar[type[LlavaNetwork]] = _Network

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        ops: TowerOps | None = None,
    ) -> None:
        super().__init__(checkpoint, device, dtype, ops)
        self._resolutions = resolutions(checkpoint.config)

    def cost(self, item: Item) -> int:
        """Of all squares. Raises BadPixels if there are not as many as the picture's size asks for."""
        if item.width < 1 or item.height < 1:
            raise BadPixels("the item does not say how large its picture was")
        down, across = self._squares(item.width, item.height)
        squares = 1 + down * across
        if item.pixels.shape != (squares, *self._image_shape):
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; a picture of"
                f" {item.width}x{item.height} has {squares} squares of {list(self._image_shape)}"
            )
        return squares * (self._side // self._patch) ** 2

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Rows [rows, hidden_size] of each image, as its size and its squares make them."""
        rows = self._features(items)
        ends = np.cumsum([len(item.pixels) for item in items]).tolist()
        return [
            self._put_together(item, rows[end - len(item.pixels) : end]).cpu()
            for item, end in zip(items, ends, strict=True)
        ]

    def sample(self, size: ItemSize) -> Item:
        """A black image."""
        down, across = self._squares(size.width, size.height)
        pixels = np.zeros((1 + down * across, *self._image_shape), np.float32)
        return pixel_item(pixels, height=size.height, width=size.width)

    def _squares(self, width: int, height: int) -> tuple[int, int]:
        """How many squares of a picture lie below and beside each other."""
        best = best_resolution(width, height, self._resolutions)
        return best[0] // self._side, best[1] // self._side

    def _put_together(self, item: Item, squares: torch.Tensor) -> torch.Tensor:
        """One sequence of rows of the squares' [1 + n, rows, hidden_size]."""
        side = self._side // self._patch
        down, across = self._squares(item.width, item.height)
        tiles = squares[1:].reshape(down, across, side, side, self.hidden_size)
        whole = tiles.transpose(1, 2).reshape(down * side, across * side, self.hidden_size)
        lines, axis = padding(item.width, item.height, whole.shape[0], whole.shape[1])
        whole = whole.narrow(axis, lines, whole.shape[axis] - 2 * lines)
        newline = self._network.get_parameter("newline").expand(whole.shape[0], 1, -1)
        return torch.cat([squares[0], torch.cat([whole, newline], 1).flatten(0, 1)])
