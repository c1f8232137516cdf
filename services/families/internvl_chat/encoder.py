"""InternVL's encoder (Chen et al., 2024): InternViT over a picture's tiles, its map folded, then a small MLP.

Pixel values are [tiles, 3, side, side]: the tiles row by row, then the whole picture where there are several.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from services.families.family import ItemSize
from services.families.internvl_chat.network import InternViT, InternViTConfig
from services.families.internvl_chat.sizes import Tiling
from services.families.internvl_chat.tower import InternViTTower
from services.vision_encoder import pixel_values, weights
from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from shared.checkpoint.folder import Checkpoint

_NAME = re.compile(r"(vision_model|mlp1)\.(.+)")
_LAYER = re.compile(r"vision_model\.encoder\.layers\.(\d+)\.")


class InternVLEncoder:
    """Tower and projector of one checkpoint. All tiles are of one size: any may run together."""

    stacked = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        ops: TowerOps | None = None,
    ) -> None:
        """ops: the kernels that do the work instead of torch, where they know how."""
        config = InternViTConfig.read(checkpoint)
        self._tiling = Tiling.read(checkpoint)
        self._shape = (3, config.image_size, config.image_size)
        self._patches = (config.image_size // config.patch_size) ** 2
        self.hidden_size = config.text_size
        self.dtype, self._device = dtype, device
        with torch.device("meta"):
            network = InternViT(config)

        def unused(name: str) -> bool:
            layer = _LAYER.match(name)
            return bool(layer and int(layer[1]) >= config.layers)

        weights.load(network, checkpoint, _names(checkpoint), unused, device, dtype)
        self._tower: Callable[[torch.Tensor], torch.Tensor] = network
        self.on_kernels = ops is not None and InternViTTower.knows(config)
        if ops is not None and self.on_kernels:
            self._tower = InternViTTower(network, config, ops)

    def cost(self, item: Item) -> int:
        """Of all tiles. Raises BadPixels if there are not as many as the picture's size asks for."""
        if item.width < 1 or item.height < 1:
            raise BadPixels("the item does not say how large its picture was")
        tiles = self._tiling.tiles(item.width, item.height)
        if item.pixels.shape != (tiles, *self._shape):
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; a picture of {item.width}x{item.height}"
                f" has {tiles} tiles of {list(self._shape)}"
            )
        return tiles * self._patches

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Rows [tiles * rows, hidden_size] of each picture."""
        rows = self._tower(pixel_values.squares(items, self._device, self.dtype)).cpu()
        apart = torch.split(rows, [len(item.pixels) for item in items])
        return [tiles.flatten(0, 1).clone() for tiles in apart]

    def sample(self, size: ItemSize) -> Item:
        """A black picture."""
        tiles = self._tiling.tiles(size.width, size.height)
        pixels = np.zeros((tiles, *self._shape), np.float32)
        return pixel_item(pixels, height=size.height, width=size.width)


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Vision tensors: the name in the file, which is that in the network."""
    for name in checkpoint.names():
        if _NAME.fullmatch(name):
            yield name, name
