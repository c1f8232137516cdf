"""Qwen-VL's encoder: a tower for squares, and a resampler that gives each as many rows."""

from collections.abc import Iterator

from services.families.qwen_vl.sizes import VisualConfig
from services.families.qwen_vl.tower import QwenVLTower
from services.vision_encoder.towers.square_encoder import SquareEncoder
from services.vision_encoder.weights import tower_weights
from shared.checkpoint.folder import Checkpoint

_PREFIX = "transformer.visual."


class QwenVLEncoder(SquareEncoder):
    """Tower and resampler of one checkpoint."""

    def _load(self, checkpoint: Checkpoint) -> None:
        config = VisualConfig.read(checkpoint)
        self._patch = config.patch_size
        self._image_shape = (3, config.image_size, config.image_size)
        self.hidden_size = config.output
        weights = tower_weights(checkpoint, _names(checkpoint))
        self._tower = QwenVLTower(weights, config, self._device.ops)
        weights.finish()


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Vision tensors: the name in the file and the name in the tower, where a linear layer's tensors have a dot before
    `weight` and `bias`."""
    for name in checkpoint.names():
        if name.startswith(_PREFIX):
            yield name, name.removeprefix(_PREFIX).replace("in_proj_", "in_proj.")
