"""Qwen2-VL and Qwen2.5-VL: towers that take images and videos of any size, packed one after the other.

Pixel values are rows of patches [patches, channels * time * side * side], in the order in which the
merger puts `spatial_merge_size` squared of them together. Attention stays inside an item's step of
time; version 2.5 has windows in most layers.
"""

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from services.vision_encoder import weights
from services.vision_encoder.models.vision_model import BadPixels, VisionItem
from shared.checkpoint import Checkpoint

# Checkpoints have `visual.`; the module tree of newer versions `model.visual.`.
_NAME = re.compile(r"(?:model\.)?visual\.(.+)")


class Qwen2VLVision:
    """Tower and merger of one checkpoint."""

    stacked = False
    config_class: ClassVar[Any] = Qwen2VLConfig
    tower_class: ClassVar[Any] = Qwen2VisionTransformerPretrainedModel

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        config: Any = self.config_class.from_dict(checkpoint.config)
        vision = config.vision_config
        self._merge = int(vision.spatial_merge_size)
        self._patch_values = int(
            vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        )
        self.hidden_size = int(config.text_config.hidden_size)
        self.dtype = dtype
        self._device = device
        with torch.device("meta"):
            tower = self.tower_class._from_config(vision)
        # Frequencies are computed, not stored: these have to be real.
        tower.rotary_pos_emb = type(tower.rotary_pos_emb)(vision).to(device)
        weights.load(tower, checkpoint, _names(checkpoint), lambda name: False, device, dtype)
        self._tower = tower

    def patches(self, item: VisionItem) -> int:
        """As the grid says. Raises BadPixels if pixel values and grid differ."""
        count = prod(item.grid)
        merges = item.grid[1] % self._merge == 0 and item.grid[2] % self._merge == 0
        if min(item.grid) < 1 or not merges or item.pixels.shape != (count, self._patch_values):
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; a grid of {list(item.grid)} patches"
                f" that are merged by {self._merge} asks for {[count, self._patch_values]}"
            )
        return count

    @torch.inference_mode()
    def encode(self, items: Sequence[VisionItem]) -> list[torch.Tensor]:
        """Rows [patches / merge^2, hidden_size] of each item."""
        packed = torch.from_numpy(np.concatenate([item.pixels for item in items]))
        grids = torch.tensor([item.grid for item in items], device=self._device)
        made = self._tower(
            packed.to(self._device, self.dtype), grid_thw=grids, return_dict=True
        ).pooler_output
        counts = [prod(item.grid) // self._merge**2 for item in items]
        return [rows.clone() for rows in made.cpu().split(counts)]

    def sample(self) -> VisionItem:
        """A black image of eight by eight merged patches."""
        side = 8 * self._merge
        return VisionItem(np.zeros((side**2, self._patch_values), np.float32), (1, side, side))


class Qwen2_5VLVision(Qwen2VLVision):
    """Version 2.5."""

    config_class: ClassVar[Any] = Qwen2_5_VLConfig
    tower_class: ClassVar[Any] = Qwen2_5_VisionTransformerPretrainedModel


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Vision tensors: the name in the file and the name in the tower."""
    for name in checkpoint.names():
        match = _NAME.fullmatch(name)
        if match:
            yield name, match[1]
