"""Qwen-VL's encoder: a tower for squares, and a resampler that gives each as many rows."""

from collections.abc import Iterator

import torch

from services.families.qwen_vl.network import QwenVLNetwork
from services.families.qwen_vl.sizes import VisualConfig
from services.families.qwen_vl.tower import QwenVLTower
from services.vision_encoder import weights
from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.towers.square_encoder import SquareEncoder
from shared.checkpoint.folder import Checkpoint

_PREFIX = "transformer.visual."


class QwenVLEncoder(SquareEncoder):
    """Tower and resampler of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        ops: TowerOps | None = None,
    ) -> None:
        """ops: the kernels that do the tower's work instead of torch."""
        config = VisualConfig.read(checkpoint)
        self._side, self._patch = config.image_size, config.patch_size
        self._image_shape = (3, self._side, self._side)
        self.hidden_size = config.output
        self.dtype, self._device = dtype, device
        with torch.device("meta"):
            network = QwenVLNetwork(config)
        weights.load(network, checkpoint, _names(checkpoint), lambda name: False, device, dtype)
        self.on_kernels = ops is not None
        self._tower = network if ops is None else QwenVLTower(network, config, ops)


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Vision tensors: the name in the file and the name in the network."""
    for name in checkpoint.names():
        if name.startswith(_PREFIX):
            yield name, name.removeprefix(_PREFIX)
