"""XComposer2's encoder: pictures of one square or of tiles, several at once."""

import re
from collections.abc import Sequence

import numpy as np
import torch

from services.families.family import ItemSize
from services.families.xcomposer2.sizes import LINE_MARK, TILE, TOWER, WHOLE_MARK, Tiling, tiles
from services.families.xcomposer2.tower import XComposer2Tower
from services.vision_encoder.towers import pixel_values
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from services.vision_encoder.towers.native_encoder import NativeEncoder
from services.vision_encoder.weights import linear_sizes, renamed, tower_weights
from shared.checkpoint.folder import Checkpoint
from shared.model_config.llava import TowerConfig

_PARTS = (
    (re.compile(re.escape(TOWER) + "(.+)"), "tower."),
    (re.compile(r"vision_proj\.(.+)"), "projector."),
    (re.compile(f"({WHOLE_MARK}|{LINE_MARK})_(?:GN|gn)"), ""),
)
# What is not run, and places that older versions of transformers stored.
_UNUSED = re.compile(r"tower\.post_layernorm\.|.*\.position_ids$")
_LAYER = re.compile(re.escape(TOWER) + r"encoder\.layers\.(\d+)\.")
_CHANNELS, _HEADS = 3, 16  # of CLIP-L


class XComposer2Encoder(NativeEncoder):
    """Tower and projector of one checkpoint."""

    def _load(self, checkpoint: Checkpoint) -> None:
        self._tiling = Tiling.read(checkpoint)
        self.hidden_size = int(checkpoint.config["hidden_size"])
        config = _tower(checkpoint, self._tiling)

        def unused(name: str) -> bool:
            return bool(_UNUSED.match(name))

        weights = tower_weights(checkpoint, renamed(checkpoint, _PARTS), unused)
        tiled = bool(self._tiling.most)
        self._tower = XComposer2Tower(weights, config, self.hidden_size, tiled, self._device.ops)
        weights.finish()

    def cost(self, item: Item) -> int:
        """Patches. Raises BadPixels for what is no picture of squares."""
        channels, height, width = item.pixels.shape[-3:]
        side = self._tiling.side
        squares = (height // side) * (width // side)
        whole = channels == _CHANNELS and height % side == width % side == 0 and squares
        if not whole or (squares > 1 and not self._tiling.most):
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}, the tower takes squares of {side}"
            )
        each = (side // self._tiling.patch) ** 2
        return int(squares + bool(self._tiling.most)) * each

    def sample(self, size: ItemSize) -> Item:
        """A black picture."""
        columns, rows = (
            tiles(size.width, size.height, self._tiling.most) if self._tiling.most else (1, 1)
        )
        side = TILE if self._tiling.most else self._tiling.side
        return pixel_item(np.zeros((_CHANNELS, rows * side, columns * side), np.float32))

    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        return self._tower(pixel_values.pictures(items, self._device))


def _tower(checkpoint: Checkpoint, tiling: Tiling) -> TowerConfig:
    """CLIP-L's settings, and sizes by the tensors: no file of the checkpoint names them."""
    numbers = [int(found[1]) for name in checkpoint.names() if (found := _LAYER.match(name))]
    inner, hidden = linear_sizes(checkpoint, f"{TOWER}encoder.layers.0.mlp.fc1")
    return TowerConfig(
        is_clip=True,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=max(numbers) + 1,
        num_heads=_HEADS,
        num_channels=_CHANNELS,
        image_size=tiling.side,
        patch_size=tiling.patch,
        activation="quick_gelu",
        eps=1e-5,
    )
