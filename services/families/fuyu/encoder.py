"""Fuyu's encoder: one linear layer from the values of a patch to its embedding row."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from services.families.family import ItemSize
from services.families.fuyu.sizes import Patching
from services.vision_encoder import pixel_values, weights
from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from shared.checkpoint.folder import Checkpoint

_LAYER = "vision_embed_tokens."
_DEFAULT_WIDTH = 4096


class FuyuEncoder:
    """The layer of one checkpoint. Each picture runs by itself: its bits depend on nothing else."""

    stacked = False
    on_kernels = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        ops: TowerOps | None = None,
    ) -> None:
        """ops: not used, torch computes the one product."""
        self._patching = Patching.read(checkpoint)
        self.hidden_size = int(checkpoint.text_config.get("hidden_size", _DEFAULT_WIDTH))
        self.dtype, self._device = dtype, device
        with torch.device("meta"):
            self._layer = nn.Linear(self._patching.values, self.hidden_size)
        weights.load(self._layer, checkpoint, _names(checkpoint), lambda name: False, device, dtype)

    def cost(self, item: Item) -> int:
        """Its patches. Raises BadPixels if there are not as many as the picture's size asks for."""
        if item.width < 1 or item.height < 1:
            raise BadPixels("the item does not say how large its picture was")
        wanted = self._shape(item.width, item.height)
        if item.pixels.shape != wanted:
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; a picture of {item.width}x{item.height}"
                f" has {list(wanted)}"
            )
        return wanted[0]

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Rows [patches, hidden_size] of each picture, line by line."""
        return [self._rows(item).cpu() for item in items]

    def sample(self, size: ItemSize) -> Item:
        """A black picture."""
        pixels = np.zeros(self._shape(size.width, size.height), np.float32)
        return pixel_item(pixels, height=size.height, width=size.width)

    def _shape(self, width: int, height: int) -> tuple[int, int]:
        rows, columns = self._patching.grid(width, height)
        return rows * columns, self._patching.values

    def _rows(self, item: Item) -> torch.Tensor:
        values = self._patching.values
        rows: torch.Tensor = self._layer(
            pixel_values.patches([item], values, self._device, self.dtype)
        )
        return rows


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """The layer's tensors: the name in the file and the name in the layer."""
    for name in checkpoint.names():
        inner = name.removeprefix("model.")
        if inner.startswith(_LAYER):
            yield name, inner.removeprefix(_LAYER)
