"""LLaVA-NeXT (Liu et al., 2024): the whole picture as one square, then the same larger, cut into squares.

The squares' rows are put together as one map, what was padding is cut off, and each line of the map
ends with the row `image_newline`. Pixel values are [1 + squares, channels, side, side].
"""

from collections.abc import Sequence

import torch

from services.families.llava.encoder import LlavaEncoder
from services.families.llava_next.sizes import best_resolution, padding, resolutions
from services.vision_encoder.towers import pixel_values
from services.vision_encoder.towers.encoder import Item
from services.vision_encoder.towers.native_encoder import SizedEncoder
from shared.checkpoint.folder import Checkpoint
from shared.model_config.llava import LlavaConfig
from shared.weights.named_weights import NamedWeights


class LlavaNextEncoder(SizedEncoder, LlavaEncoder):
    """Tower, projector and newline of one checkpoint. All squares are of one size: any may run together."""

    stacked = False

    def _load(self, checkpoint: Checkpoint) -> None:
        super()._load(checkpoint)
        self._resolutions = resolutions(checkpoint.config)
        self._side = self._image_shape[1] // self._patch  # of a square, in patches
        self._patches = self._side**2

    def _take(self, weights: NamedWeights, config: LlavaConfig) -> None:
        super()._take(weights, config)
        self._newline = self._device.ops.vector(weights.take("newline", config.text_size))

    def _shape(self, width: int, height: int) -> tuple[int, ...]:
        down, across = self._squares(width, height)
        return 1 + down * across, *self._image_shape

    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        rows = self._tower(pixel_values.squares(items, self._device))
        apart = torch.split(rows, [len(item.pixels) for item in items])
        return [
            self._put_together(item, squares) for item, squares in zip(items, apart, strict=True)
        ]

    def _squares(self, width: int, height: int) -> tuple[int, int]:
        """How many squares of a picture lie below and beside each other."""
        best = best_resolution(width, height, self._resolutions)
        return best[0] // self._image_shape[1], best[1] // self._image_shape[1]

    def _put_together(self, item: Item, squares: torch.Tensor) -> torch.Tensor:
        """One sequence of rows of the squares' [1 + n, rows, hidden_size]."""
        side = self._side
        down, across = self._squares(item.width, item.height)
        tiles = squares[1:].reshape(down, across, side, side, self.hidden_size)
        whole = tiles.transpose(1, 2).reshape(down * side, across * side, self.hidden_size)
        lines, axis = padding(item.width, item.height, whole.shape[0], whole.shape[1])
        whole = whole.narrow(axis, lines, whole.shape[axis] - 2 * lines)
        newline = self._newline.expand(whole.shape[0], 1, -1)
        return torch.cat([squares[0], torch.cat([whole, newline], 1).flatten(0, 1)])
