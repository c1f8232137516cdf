"""LLaVA 1.5 (Liu et al. 2023): hidden states of a CLIP or SigLIP tower, then linear, gelu, linear.

    vision_feature_layer            hidden state to take, or several, concatenated; counted as in transformers, where
                                    0 is what enters the first layer and -1 what leaves the last
    vision_feature_select_strategy  "default" drops the first row (CLIP's class token), "full" keeps all

Layers above the last hidden state that is taken are neither loaded nor run.
"""

import re
from typing import ClassVar

import torch

from services.vision_encoder import weights
from services.vision_encoder.devices.cpu import TowerOps
from services.vision_encoder.towers.llava_network import LlavaNetwork
from services.vision_encoder.towers.llava_tower import LlavaTower
from services.vision_encoder.towers.square_encoder import SquareEncoder
from shared.checkpoint.folder import Checkpoint
from shared.model_config.llava import LlavaConfig

# Old checkpoints have `vision_tower.vision_model.`, new ones may have `model.` before everything.
_PARTS = (
    (re.compile(r"(?:model\.)?vision_tower\.(?:vision_model\.)?(.+)"), "tower."),
    (re.compile(r"(?:model\.)?multi_modal_projector\.(.+)"), "projector."),
    (re.compile(r"(?:model\.)?image_(newline)"), ""),
)
_LAYER = re.compile(r"tower\.encoder\.layers\.(\d+)\.")
# What classifies whole pictures, and places that older versions of transformers stored.
_UNUSED = re.compile(r"tower\.(?:post_layernorm\.|head\.)|.*\.position_ids$")


class LlavaEncoder(SquareEncoder):
    """Tower and projector of one checkpoint."""

    network_class: ClassVar[type[LlavaNetwork]] = LlavaNetwork

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        ops: TowerOps | None = None,
    ) -> None:
        """ops: the kernels that do the work instead of torch, where they know how."""
        config = LlavaConfig.read(checkpoint)
        tower = config.tower
        self._side, self._patch = tower.image_size, tower.patch_size
        self._image_shape = (tower.num_channels, self._side, self._side)
        self.hidden_size = config.text_size
        self.dtype = dtype
        self._device = device
        kept = max(config.layers)
        with torch.device("meta"):
            self._network = self.network_class(config)

        def unused(name: str) -> bool:
            layer = _LAYER.match(name)
            return bool((layer and int(layer[1]) >= kept) or _UNUSED.match(name))

        weights.load(
            self._network, checkpoint, weights.renamed(checkpoint, _PARTS), unused, device, dtype
        )
        self._tower = self._network
        self.on_kernels = ops is not None and LlavaTower.knows(config)
        if ops is not None and self.on_kernels:
            self._tower = LlavaTower(self._network, config, ops)
