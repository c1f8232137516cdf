"""Fuyu's encoder: one linear layer from the values of a patch to its embedding row."""

from collections.abc import Iterator, Sequence

import torch

from services.families.fuyu.sizes import Patching
from services.vision_encoder.towers import pixel_values
from services.vision_encoder.towers.encoder import Item
from services.vision_encoder.towers.native_encoder import SizedEncoder
from services.vision_encoder.weights import tower_weights
from shared.checkpoint.folder import Checkpoint

_LAYER = "vision_embed_tokens"
_DEFAULT_WIDTH = 4096


class FuyuEncoder(SizedEncoder):
    """The layer of one checkpoint. Pixel values are [patches, values], line by line."""

    def _load(self, checkpoint: Checkpoint) -> None:
        self._patching = Patching.read(checkpoint)
        self.hidden_size = int(checkpoint.text_config.get("hidden_size", _DEFAULT_WIDTH))
        weights = tower_weights(checkpoint, _names(checkpoint))
        layer = weights.take_linear(_LAYER, self.hidden_size, self._patching.values, True)
        self._layer = self._device.ops.pack(layer)
        weights.finish()

    def _shape(self, width: int, height: int) -> tuple[int, ...]:
        rows, columns = self._patching.grid(width, height)
        return rows * columns, self._patching.values

    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        packed = pixel_values.patches(items, self._patching.values, self._device)
        made = self._device.ops.linear(packed, self._layer)
        return list(torch.split(made, [len(item.pixels) for item in items]))


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """The layer's tensors: the name in the file and without the prefix of newer ones."""
    for name in checkpoint.names():
        inner = name.removeprefix("model.")
        if inner.startswith(f"{_LAYER}."):
            yield name, inner
