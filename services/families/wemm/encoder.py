"""WeMM's encoder: pictures of any shape, several at once."""

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from services.families.family import ItemSize
from services.families.wemm.sizes import Resizing, processor
from services.families.wemm.tower import WeMMTower
from services.families.wemm.vision_config import WeMMVisionConfig
from services.vision_encoder.towers import pixel_values
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from services.vision_encoder.towers.native_encoder import NativeEncoder
from services.vision_encoder.weights import renamed, tower_weights
from shared.checkpoint.folder import Checkpoint

_PARTS = (
    (re.compile(r"vision_tower\.(.+)"), "tower."),
    (re.compile(r"downsampler\.(.+)"), "downsampler."),
    (re.compile(r"visual_source_spliter_emb\.(.+)"), "separators."),
)
_CHANNELS = 3


class WeMMEncoder(NativeEncoder):
    """Tower, downsampler and separators of one checkpoint."""

    def _load(self, checkpoint: Checkpoint) -> None:
        config = WeMMVisionConfig.read(checkpoint)
        self._resizing = Resizing.of(checkpoint, processor(checkpoint))
        self._patch = config.tower.patch_size
        self.hidden_size = int(checkpoint.text_config["hidden_size"])
        weights = tower_weights(checkpoint, renamed(checkpoint, _PARTS))
        self._tower = WeMMTower(weights, config, self._device)
        weights.finish()

    def cost(self, item: Item) -> int:
        """Patches. Raises BadPixels for what is no picture."""
        shape = item.pixels.shape
        if shape[:-3] not in ((), (1,)) or shape[-3] != _CHANNELS or min(shape[-2:]) < self._patch:
            raise BadPixels(
                f"pixel values are {list(shape)}, not one picture of {_CHANNELS} channels"
            )
        rows, columns = self._resizing.grid(shape[-1], shape[-2])
        return rows * columns

    def sample(self, size: ItemSize) -> Item:
        """A black picture."""
        width, height = self._resizing.resized(size.width, size.height)
        return pixel_item(np.zeros((_CHANNELS, height, width), np.float32))

    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        pictures = pixel_values.pictures(items, self._device)
        return self._tower([self._whole_patches(picture) for picture in pictures])

    def _whole_patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """[1, 3, height, width]: zeros, the middle of the range of values, fill the last patches, or these are cut."""
        height, width = pixels.shape[-2:]
        rows, columns = self._resizing.grid(width, height)
        return F.pad(pixels, (0, columns * self._patch - width, 0, rows * self._patch - height))
