"""Molmo's encoder: a tower over a picture's views, each square of patches pooled to one row."""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from services.families.molmo.sizes import Cropping, Fitting
from services.families.molmo.tower import MolmoTower
from services.families.molmo.vision_config import PREFIX, MolmoVisionConfig
from services.vision_encoder.towers.encoder import Item
from services.vision_encoder.towers.native_encoder import SizedEncoder
from services.vision_encoder.weights import of_layers_from, tower_weights
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

_LAYER = re.compile(r"image_vit\.transformer\.resblocks\.(\d+)\.")
_CHANNELS = 3


class MolmoEncoder(SizedEncoder):
    """Tower, pooling and projector of one checkpoint. Each picture runs by itself: it has up to 13 views."""

    def _load(self, checkpoint: Checkpoint) -> None:
        config = MolmoVisionConfig.read(checkpoint)
        self._cropping = Cropping.read(checkpoint)
        self._patches = self._cropping.patches**2
        self._view = (self._patches, _CHANNELS * self._cropping.patch**2)
        if (config.places - 1, config.values) != self._view:
            raise InvalidRequest(
                "BAD_CHECKPOINT",
                f"{checkpoint.folder}: the tower sees {config.places - 1} patches of {config.values} values,"
                f" the image processor makes {self._view[0]} of {self._view[1]}",
                field="model",
            )
        self.hidden_size = config.text_size
        unused = of_layers_from(config.layers, _LAYER)
        weights = tower_weights(checkpoint, _names(checkpoint), unused)
        self._tower = MolmoTower(weights, config, self._device.ops)
        weights.finish()

    def _shape(self, width: int, height: int) -> tuple[int, ...]:
        rows, columns = self._cropping.tiling(width, height)
        return 1 + rows * columns, *self._view

    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        return [self._picture_rows(item) for item in items]

    def _picture_rows(self, item: Item) -> torch.Tensor:
        """[cells, hidden_size]: those of the whole picture, then those of all crops, line by line."""
        places = self._cropping.places(self._cropping.tiling(item.width, item.height))
        host = (np.array(item.pixels), *self._masks(item), places.astype(np.int32))
        pixels, *masks, order = self._device.upload(*map(torch.from_numpy, host))
        found = self._tower(pixels.to(self.dtype), *masks)
        return torch.cat([found[0], found[1:].flatten(0, 1).index_select(0, order)])

    def _masks(
        self, item: Item
    ) -> "tuple[np.ndarray[tuple[int, int], np.dtype[np.bool_]], np.ndarray[tuple[int, int], np.dtype[np.bool_]]]":
        """Patches [views, patches] that show nothing of the picture, and those that show it in part.

        As in the released processor, which the model was trained with, a view has the mask of the one behind it: the
        whole picture that of the first crop, and the last crop counts as shown in part everywhere.
        """
        cropping = self._cropping
        tiling = cropping.tiling(item.width, item.height)
        rows, columns = cropping.grid(tiling)
        outer = (rows * cropping.patch, columns * cropping.patch)
        shown = Fitting.of(item.width, item.height, outer).shown(cropping.patch)
        side, step = cropping.patches, cropping.window
        crops = [
            shown[top : top + side, left : left + side].reshape(-1)
            for top in range(0, tiling[0] * step, step)
            for left in range(0, tiling[1] * step, step)
        ]
        counts = np.stack([*crops, np.ones_like(crops[0])])
        empty = counts == 0
        return empty, ~empty & (counts < cropping.patch**2)


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Vision tensors: the name in the file and the name in the network."""
    for name in checkpoint.names():
        if name.startswith(PREFIX):
            yield name, name.removeprefix(PREFIX)
