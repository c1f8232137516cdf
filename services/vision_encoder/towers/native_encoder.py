"""What the encoders have in common whose towers are made of a device's operations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from services.families.family import ItemSize
from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from shared.checkpoint.folder import Checkpoint


class NativeEncoder(ABC):
    """Loads a tower and runs it over several items. See `Encoder`."""

    stacked = False
    uses_ops = True
    hidden_size: int

    def __init__(self, checkpoint: Checkpoint, device: Device) -> None:
        """Raises InvalidRequest for a checkpoint that is not served."""
        self.dtype = device.dtype
        self._device = device
        self._load(checkpoint)

    @abstractmethod
    def _load(self, checkpoint: Checkpoint) -> None:
        """Reads the configuration, loads the weights and sets `hidden_size`."""

    @abstractmethod
    def cost(self, item: Item) -> int:
        """See `Encoder.cost`."""

    @abstractmethod
    def sample(self, size: ItemSize) -> Item:
        """See `Encoder.sample`."""

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Rows [rows, hidden_size] of each item, on the host."""
        return self._device.download(self._rows(items))

    @abstractmethod
    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """The same on the device."""


class SizedEncoder(NativeEncoder):
    """For pictures whose size alone tells the shape of their pixel values, such as those that are cut into tiles."""

    _patches: int = 1  # for each of what the first axis of pixel values counts

    @abstractmethod
    def _shape(self, width: int, height: int) -> tuple[int, ...]:
        """The shape of the pixel values of a picture of so many pixels."""

    def cost(self, item: Item) -> int:
        """Patches of all tiles. Raises BadPixels if there are not as many as the picture's size asks for."""
        if item.width < 1 or item.height < 1:
            raise BadPixels("the item does not say how large its picture was")
        wanted = self._shape(item.width, item.height)
        if item.pixels.shape != wanted:
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; a picture of {item.width}x{item.height}"
                f" has {list(wanted)}"
            )
        return wanted[0] * self._patches

    def sample(self, size: ItemSize) -> Item:
        """A black picture."""
        pixels = np.zeros(self._shape(size.width, size.height), np.float32)
        return pixel_item(pixels, height=size.height, width=size.width)
