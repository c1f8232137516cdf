"""Molmo's encoder: a tower over a picture's views, each square of patches pooled to one row."""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from services.families.family import ItemSize
from services.families.molmo.network import PREFIX, MolmoNetwork, MolmoVisionConfig
from services.families.molmo.sizes import Cropping, Fitting
from services.families.molmo.tower import MolmoTower
from services.vision_encoder import weights
from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

_LAYER = re.compile(r"image_vit\.transformer\.resblocks\.(\d+)\.")
_CHANNELS = 3


class MolmoEncoder:
    """Tower, pooling and projector of one checkpoint. Each picture runs by itself: it has up to 13 views."""

    stacked = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        ops: TowerOps | None = None,
    ) -> None:
        """ops: the kernels that do the work instead of torch. Raises InvalidRequest for a tower and an image processor
        that do not fit each other."""
        config = MolmoVisionConfig.read(checkpoint)
        self._cropping = Cropping.read(checkpoint)
        self._shape = (self._cropping.patches**2, _CHANNELS * self._cropping.patch**2)
        if (config.places - 1, config.values) != self._shape:
            raise InvalidRequest(
                "BAD_CHECKPOINT",
                f"{checkpoint.folder}: the tower sees {config.places - 1} patches of {config.values} values,"
                f" the image processor makes {self._shape[0]} of {self._shape[1]}",
                field="model",
            )
        self.hidden_size = config.text_size
        self.dtype, self._device = dtype, device
        with torch.device("meta"):
            network = MolmoNetwork(config)

        def unused(name: str) -> bool:
            layer = _LAYER.match(name)
            return bool(layer and int(layer[1]) >= config.layers)

        weights.load(network, checkpoint, _names(checkpoint), unused, device, dtype)
        self.on_kernels = ops is not None
        self._tower: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
        self._tower = network if ops is None else MolmoTower(network, config, ops)

    def cost(self, item: Item) -> int:
        """Of all views. Raises BadPixels if there are not as many as the picture's size asks for."""
        if item.width < 1 or item.height < 1:
            raise BadPixels("the item does not say how large its picture was")
        rows, columns = self._cropping.tiling(item.width, item.height)
        wanted = (1 + rows * columns, *self._shape)
        if item.pixels.shape != wanted:
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; a picture of {item.width}x{item.height}"
                f" has {list(wanted)}"
            )
        return wanted[0] * wanted[1]

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Rows [cells, hidden_size] of each picture: those of the whole one, then those of all crops, line by line."""
        return [self._rows(item).cpu() for item in items]

    def sample(self, size: ItemSize) -> Item:
        """A black picture."""
        rows, columns = self._cropping.tiling(size.width, size.height)
        pixels = np.zeros((1 + rows * columns, *self._shape), np.float32)
        return pixel_item(pixels, height=size.height, width=size.width)

    def _rows(self, item: Item) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(item.pixels)).to(self._device, self.dtype)
        masks = (torch.from_numpy(mask).to(self._device) for mask in self._masks(item))
        found = self._tower(pixels, *masks)
        places = self._cropping.places(self._cropping.tiling(item.width, item.height))
        crops = found[1:].flatten(0, 1)[torch.from_numpy(places).to(self._device)]
        return torch.cat([found[0], crops])

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
