"""CLIP and SigLIP towers with LLaVA's projector (Liu et al., 2023)."""

from typing import Any

import torch
from torch import Tensor, nn

from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import patch_rows
from services.vision_encoder.towers.clip_modules import clip_modules
from services.vision_encoder.towers.clip_tower import clip_tower
from shared.model_config.llava import LlavaConfig


def llava_modules(config: LlavaConfig) -> nn.ModuleDict:
    """The weights, by the names of checkpoints. Layers above the last state that is taken are left out."""
    inputs, size = config.tower.hidden_size * len(config.layers), config.text_size
    bias = config.projector_bias
    projector = {
        "linear_1": nn.Linear(inputs, size, bias=bias),
        "linear_2": nn.Linear(size, size, bias=bias),
    }
    tower = clip_modules(config.tower, max(config.layers))
    return nn.ModuleDict({"tower": tower, "projector": nn.ModuleDict(projector)})


class LlavaTower:
    """Squares of pixels to projected rows. Takes the weights away from the modules it is made of."""

    def __init__(self, modules: Any, config: LlavaConfig, ops: TowerOps) -> None:
        """modules: those of `llava_modules`, with the checkpoint's weights."""
        self._ops = ops
        self._layers = config.layers
        self._drops_first = config.drops_first
        self._patch = config.tower.patch_size
        self._tower = clip_tower(ops, modules.tower, config.tower)
        projector = modules.projector
        self._up = ops.pack(projector.linear_1, activation=config.projector_activation)
        self._down = ops.pack(projector.linear_2)

    def __call__(self, pixels: Tensor) -> Tensor:
        """[n, channels, side, side] to [n, rows, hidden size of the language model]."""
        states = self._tower(patch_rows(pixels, self._patch), keep=self._layers)
        taken = [states[layer] for layer in self._layers]
        if self._drops_first:
            taken = [state[:, 1:] for state in taken]
        features = torch.cat(taken, dim=-1)
        projected = self._ops.linear(features.flatten(0, 1).contiguous(), self._up)
        return self._ops.linear(projected, self._down).view(*features.shape[:2], -1)
