"""CLIP and SigLIP towers with LLaVA's projector (Liu et al., 2023)."""

import torch
from torch import Tensor

from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import patch_rows
from services.vision_encoder.towers.clip_tower import clip_tower
from shared.model_config.llava import LlavaConfig
from shared.weights.named_weights import NamedWeights


class LlavaTower:
    """Squares of pixels to projected rows. Layers above the last state that is taken are left out."""

    def __init__(self, weights: NamedWeights, config: LlavaConfig, ops: TowerOps) -> None:
        """weights: tensors `tower`.X and `projector`.X, by the names of checkpoints otherwise."""
        self._ops = ops
        self._layers = config.layers
        self._drops_first = config.drops_first
        self._patch = config.tower.patch_size
        self._tower = clip_tower(weights, config.tower, max(config.layers), ops)
        inputs, size = config.tower.hidden_size * len(config.layers), config.text_size
        bias = config.projector_bias
        up = weights.take_linear("projector.linear_1", size, inputs, bias)
        self._up = ops.pack(up, config.projector_activation)
        self._down = ops.pack(weights.take_linear("projector.linear_2", size, size, bias))

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, channels, side, side] to [n, rows, hidden size of the language model]."""
        states = self._tower(patch_rows(pixels, self._patch), keep=self._layers)
        taken = [states[layer] for layer in self._layers]
        if self._drops_first:
            taken = [state[:, 1:] for state in taken]
        features = torch.cat(taken, dim=-1)
        projected = self._ops.linear(features.flatten(0, 1).contiguous(), self._up)
        return self._ops.linear(projected, self._down).view(*features.shape[:2], -1)
