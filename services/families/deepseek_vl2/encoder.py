"""DeepSeek-VL2's encoder: SigLIP over a picture's tiles, whose rows are put together as one map.

Pixel values are [1 + tiles, 3, side, side]: the whole picture, then the tiles row by row.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from services.families.deepseek_vl2.network import DeepSeekVL2Network
from services.families.deepseek_vl2.sizes import Tiling
from services.families.deepseek_vl2.tower import DeepSeekVL2Tower
from services.families.deepseek_vl2.vision_config import VisionConfig
from services.families.family import ItemSize
from services.vision_encoder import pixel_values, weights
from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from shared.checkpoint.folder import Checkpoint

_NAME = re.compile(r"(?:vision|projector)\..+|image_newline|view_seperator")
_UNUSED = "vision.attn_pool."  # what pools all patches to one row


class DeepSeekVL2Encoder:
    """Tower, projector and marks of one checkpoint. Each picture runs by itself: it has several tiles."""

    stacked = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        ops: TowerOps | None = None,
    ) -> None:
        """ops: the kernels that do the work instead of torch. Raises InvalidRequest for options that are not served."""
        config = VisionConfig.read(checkpoint)
        self._tiling = Tiling.read(checkpoint)
        self._shape = (3, config.image_size, config.image_size)
        self._patches = config.side**2
        self.hidden_size = config.text_size
        self.dtype, self._device = dtype, device
        with torch.device("meta"):
            network = DeepSeekVL2Network(config)

        def unused(name: str) -> bool:
            return name.startswith(_UNUSED)

        weights.load(network, checkpoint, _names(checkpoint), unused, device, dtype)
        self._end, self._separator = network.image_newline, network.view_seperator
        self.on_kernels = ops is not None
        self._tower: Callable[[torch.Tensor], torch.Tensor]
        self._tower = network if ops is None else DeepSeekVL2Tower(network, config, ops)

    def cost(self, item: Item) -> int:
        """Of all tiles. Raises BadPixels if there are not as many as the picture's size asks for."""
        if item.width < 1 or item.height < 1:
            raise BadPixels("the item does not say how large its picture was")
        views = self._tiling.views(item.width, item.height)
        if item.pixels.shape != (views, *self._shape):
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; a picture of {item.width}x{item.height}"
                f" has {views} tiles of {list(self._shape)}"
            )
        return views * self._patches

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Rows [rows, hidden_size] of each picture."""
        return [self._rows(item).cpu() for item in items]

    def sample(self, size: ItemSize) -> Item:
        """A black picture."""
        views = self._tiling.views(size.width, size.height)
        pixels = np.zeros((views, *self._shape), np.float32)
        return pixel_item(pixels, height=size.height, width=size.width)

    def _rows(self, item: Item) -> torch.Tensor:
        """The whole picture's lines, the separator, the lines across all tiles."""
        line = self._tiling.line
        columns, rows = self._tiling.grid(item.width, item.height)
        views = self._tower(pixel_values.squares([item], self._device, self.dtype))
        whole, *_ = maps = views.unflatten(1, (line, line))
        apart = maps[1:].unflatten(0, (rows, columns)).transpose(1, 2)
        across = apart.reshape(rows * line, columns * line, -1)
        return torch.cat([self._ended(whole), self._separator[None], self._ended(across)])

    def _ended(self, lines: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] of lines [lines, n, hidden_size], each with its end."""
        ends = self._end.expand(len(lines), 1, -1)
        return torch.cat([lines, ends], dim=1).flatten(0, 1)


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Vision tensors: the name in the file, which is that in the network."""
    for name in checkpoint.names():
        if _NAME.fullmatch(name):
            yield name, name
