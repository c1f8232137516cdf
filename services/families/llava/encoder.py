"""LLaVA 1.5 (Liu et al. 2023): hidden states of a CLIP or SigLIP tower, then linear, gelu, linear.

    vision_feature_layer            hidden state to take, or several, concatenated; counted as in transformers, where
                                    0 is what enters the first layer and -1 what leaves the last
    vision_feature_select_strategy  "default" drops the first row (CLIP's class token), "full" keeps all

Layers above the last hidden state that is taken are neither loaded nor run.
"""

import re

import torch
from torch import nn

from services.vision_encoder import weights
from services.vision_encoder.towers.llava_tower import LlavaTower, llava_modules
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

    def _load(self, checkpoint: Checkpoint) -> None:
        config = LlavaConfig.read(checkpoint)
        tower = config.tower
        self._patch = tower.patch_size
        self._image_shape = (tower.num_channels, tower.image_size, tower.image_size)
        self.hidden_size = config.text_size
        kept = max(config.layers)
        with torch.device("meta"):
            modules = self._make_modules(config)

        def unused(name: str) -> bool:
            layer = _LAYER.match(name)
            return bool((layer and int(layer[1]) >= kept) or _UNUSED.match(name))

        names = weights.renamed(checkpoint, _PARTS)
        weights.load(modules, checkpoint, names, self._device, unused)
        self._take(modules, config)

    def _make_modules(self, config: LlavaConfig) -> nn.Module:
        return llava_modules(config)

    def _take(self, modules: nn.Module, config: LlavaConfig) -> None:
        """What computes, out of loaded weights."""
        self._tower = LlavaTower(modules, config, self._device.ops)
