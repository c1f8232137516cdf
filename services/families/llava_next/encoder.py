"""LLaVA-NeXT (Liu et al., 2024): the whole picture as one square, then the same larger, cut into squares.

The squares' rows are put together as one map, what was padding is cut off, and each line of the map
ends with the row `image_newline`. Pixel values are [1 + squares, channels, side, side].
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.models.llava import LlavaVision
from services.vision_encoder.models.llava_network import LlavaNetwork
from services.vision_encoder.models.vision_model import BadPixels, VisionItem
from shared.checkpoint.folder import Checkpoint
from shared.model_config.llava import LlavaConfig

# Height and width in pixels, for a config.json that names none.
_RESOLUTIONS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


class _Network(LlavaNetwork):
    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        self.newline = nn.Parameter(torch.empty(config.text_size))


class LlavaNextVision(LlavaVision):
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
        self._resolutions = checkpoint.config.get("image_grid_pinpoints") or _RESOLUTIONS

    def patches(self, item: VisionItem) -> int:
        """Of all squares. Raises BadPixels if there are not as many as the picture's size asks for."""
        if item.width < 1 or item.height < 1:
            raise BadPixels("the item does not say how large its picture was")
        down, across = self._squares(item)
        squares = 1 + down * across
        if item.pixels.shape != (squares, *self._image_shape):
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; a picture of"
                f" {item.width}x{item.height} has {squares} squares of {list(self._image_shape)}"
            )
        return squares * (self._side // self._patch) ** 2

    @torch.inference_mode()
    def encode(self, items: Sequence[VisionItem]) -> list[torch.Tensor]:
        """Rows [rows, hidden_size] of each image, as its size and its squares make them."""
        rows = self._features(items)
        ends = np.cumsum([len(item.pixels) for item in items]).tolist()
        return [
            self._put_together(item, rows[end - len(item.pixels) : end]).cpu()
            for item, end in zip(items, ends, strict=True)
        ]

    def sample(self) -> VisionItem:
        """A black image that just fits the first resolution."""
        height, width = self._resolutions[0]
        count = 1 + (height // self._side) * (width // self._side)
        pixels = np.zeros((count, *self._image_shape), np.float32)
        return VisionItem(pixels, height=height, width=width)

    def _squares(self, item: VisionItem) -> tuple[int, int]:
        """How many squares lie below and beside each other."""
        best = _best_resolution(item, self._resolutions)
        return best[0] // self._side, best[1] // self._side

    def _put_together(self, item: VisionItem, squares: torch.Tensor) -> torch.Tensor:
        """One sequence of rows of the squares' [1 + n, rows, hidden_size]."""
        side = self._side // self._patch
        down, across = self._squares(item)
        tiles = squares[1:].reshape(down, across, side, side, self.hidden_size)
        whole = tiles.transpose(1, 2).reshape(down * side, across * side, self.hidden_size)
        padding, axis = _padding(item, whole.shape[0], whole.shape[1])
        whole = whole.narrow(axis, padding, whole.shape[axis] - 2 * padding)
        newline = self._network.get_parameter("newline").expand(whole.shape[0], 1, -1)
        return torch.cat([squares[0], torch.cat([whole, newline], 1).flatten(0, 1)])


def _best_resolution(item: VisionItem, resolutions: Sequence[Sequence[int]]) -> Sequence[int]:
    """The (height, width) that keeps most pixels of a picture, and of those the one that wastes least."""

    def merit(resolution: Sequence[int]) -> tuple[int, int]:
        scale = min(resolution[1] / item.width, resolution[0] / item.height)
        kept = min(int(item.width * scale) * int(item.height * scale), item.width * item.height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=merit)


def _padding(item: VisionItem, height: int, width: int) -> tuple[int, int]:
    """Lines of padding on each side of a map [height, width], and the axis they are counted on.

    Rounded as transformers' `unpad_image` does, on whose numbers the models were trained.
    """
    if item.width / item.height > width / height:
        return (height - int(round(item.height * (width / item.width), 7))) // 2, 0
    return (width - int(round(item.width * (height / item.height), 7))) // 2, 1
