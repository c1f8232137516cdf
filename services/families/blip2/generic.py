"""BLIP-2's encoder: `get_image_features` of its class, over squares of one size."""

from collections.abc import Mapping, Sequence

import numpy as np
import PIL.Image
import torch

from services.families.blip2.sizes import PictureConfig
from services.families.family import ItemSize
from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.generic import GenericEncoder
from services.vision_encoder.towers import pixel_values
from services.vision_encoder.towers.encoder import PIXEL_VALUES, BadPixels, Item, PixelArray
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import picture_tensors


class Blip2Encoder(GenericEncoder):
    """Tower, Q-Former and projection of one checkpoint. Pixel values are [3, side, side]."""

    def __init__(self, checkpoint: Checkpoint, device: Device) -> None:
        """Raises as `GenericEncoder` does."""
        self._config = PictureConfig.read(checkpoint)
        super().__init__(checkpoint, device)

    def cost(self, item: Item) -> int:
        """See `GenericEncoder.cost`. Raises BadPixels for a square of another size."""
        side = self._config.image_size
        found = list(item.tensors[PIXEL_VALUES].shape[-3:]) if item.tensors else []
        if found != [3, side, side]:
            raise BadPixels(f"pixel values are {found}; pictures are {[3, side, side]}")
        return super().cost(item)

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Rows [rows, hidden_size] of each item by itself: its bits depend on nothing else."""
        squares = (pixel_values.squares([item], self._device) for item in items)
        return self._device.download([self._compute({PIXEL_VALUES: one}) for one in squares])

    def _make(self, size: ItemSize) -> tuple[PixelArray, Mapping[str, PixelArray]]:
        # The processor itself does not say which ids are the picture's.
        picture = PIL.Image.new("RGB", (size.width, size.height))
        made = self._processor.image_processor(images=[picture], return_tensors="np")
        return np.full(self._config.rows, self._config.token), picture_tensors(made)
