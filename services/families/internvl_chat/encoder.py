"""InternVL's encoder (Chen et al., 2024): InternViT over a picture's tiles, its map folded, then a small MLP.

Pixel values are [tiles, 3, side, side]: the tiles row by row, then the whole picture where there are several.
"""

import re
from collections.abc import Sequence

import torch

from services.families.internvl_chat.sizes import Tiling
from services.families.internvl_chat.tower import InternViTTower
from services.families.internvl_chat.vision_config import InternViTConfig
from services.vision_encoder.towers import pixel_values
from services.vision_encoder.towers.encoder import BadPixels, Item
from services.vision_encoder.towers.native_encoder import SizedEncoder
from services.vision_encoder.weights import of_layers_from, renamed, tower_weights
from shared.checkpoint.folder import Checkpoint

_PARTS = ((re.compile(r"((?:vision_model|mlp1)\..+)"), ""),)
_LAYER = re.compile(r"vision_model\.encoder\.layers\.(\d+)\.")


class InternVLEncoder(SizedEncoder):
    """Tower and projector of one checkpoint. All tiles are of one size: any may run together."""

    def _load(self, checkpoint: Checkpoint) -> None:
        config = InternViTConfig.read(checkpoint)
        self._tiling = Tiling.read(checkpoint)
        self._tile = (3, config.image_size, config.image_size)
        self._patches = (config.image_size // config.patch_size) ** 2
        self.hidden_size = config.text_size
        unused = of_layers_from(config.layers, _LAYER)
        weights = tower_weights(checkpoint, renamed(checkpoint, _PARTS), unused)
        self._tower = InternViTTower(weights, config, self._device.ops)
        weights.finish()

    def _shape(self, width: int, height: int) -> tuple[int, ...]:
        return self._tiling.tiles(width, height), *self._tile

    def cost(self, item: Item) -> int:
        """Patches of all tiles, of which a request may ask for fewer than the picture's size does. Raises BadPixels for
        other shapes.
        """
        columns, rows = self._tiling.largest()
        most = columns * rows + (columns * rows > 1)
        count, *tile = item.pixels.shape
        if tuple(tile) != self._tile or not 1 <= count <= most:
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; up to {most} tiles of {list(self._tile)} are taken"
            )
        return int(count) * self._patches

    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        rows = self._tower(pixel_values.squares(items, self._device))
        apart = torch.split(rows, [len(item.pixels) for item in items])
        return [tiles.flatten(0, 1) for tiles in apart]
