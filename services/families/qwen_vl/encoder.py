"""Qwen-VL's encoder: a tower for squares, and a resampler that gives each as many rows."""

from collections.abc import Iterator

import torch

from services.families.qwen_vl.sizes import VisualConfig
from services.families.qwen_vl.tower import QwenVLTower, qwen_vl_modules
from services.vision_encoder import weights
from services.vision_encoder.towers.square_encoder import SquareEncoder
from shared.checkpoint.folder import Checkpoint

_PREFIX = "transformer.visual."


class QwenVLEncoder(SquareEncoder):
    """Tower and resampler of one checkpoint."""

    def _load(self, checkpoint: Checkpoint) -> None:
        config = VisualConfig.read(checkpoint)
        self._patch = config.patch_size
        self._image_shape = (3, config.image_size, config.image_size)
        self.hidden_size = config.output
        with torch.device("meta"):
            modules = qwen_vl_modules(config)
        weights.load(modules, checkpoint, _names(checkpoint), self._device)
        self._tower = QwenVLTower(modules, config, self._device.ops)


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Vision tensors: the name in the file and the name in the network."""
    for name in checkpoint.names():
        if name.startswith(_PREFIX):
            yield name, name.removeprefix(_PREFIX)
