"""LLaVA 1.5 (Liu et al. 2023): hidden states of a CLIP or SigLIP tower, then linear, gelu, linear.

    vision_feature_layer            hidden state to take, or several, concatenated; counted as in transformers, where
                                    0 is what enters the first layer and -1 what leaves the last
    vision_feature_select_strategy  "default" drops the first row (CLIP's class token), "full" keeps all

Layers above the last hidden state that is taken are neither loaded nor run.
"""

import re

from services.vision_encoder.towers.llava_tower import LlavaTower
from services.vision_encoder.towers.square_encoder import SquareEncoder
from services.vision_encoder.weights import of_layers_from, renamed, tower_weights
from shared.checkpoint.folder import Checkpoint
from shared.model_config.llava import LlavaConfig
from shared.weights.named_weights import NamedWeights

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
        is_above = of_layers_from(max(config.layers), _LAYER)

        def unused(name: str) -> bool:
            return is_above(name) or bool(_UNUSED.match(name))

        weights = tower_weights(checkpoint, renamed(checkpoint, _PARTS), unused)
        self._take(weights, config)
        weights.finish()

    def _take(self, weights: NamedWeights, config: LlavaConfig) -> None:
        """What computes."""
        self._tower = LlavaTower(weights, config, self._device.ops)
