"""Qwen2-VL and Qwen2.5-VL: towers that take images and videos of any size, packed one after the other.

Pixel values are rows of patches [patches, channels * time * side * side] (as bytes also
[patches, channels * side * side], for what stands still), in the order in which the
merger puts `spatial_merge_size` squared of them together. Attention stays inside an item's step of
time; version 2.5 has windows in most layers.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding

from services.families.family import ItemSize
from services.families.qwen2_vl.sizes import DEFAULTS, Resizing, pixel_bounds
from services.vision_encoder.towers import pixel_values
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item
from services.vision_encoder.towers.native_encoder import NativeEncoder
from services.vision_encoder.towers.qwen_tower import QwenTower
from services.vision_encoder.weights import renamed, tower_weights
from shared.checkpoint.folder import Checkpoint

# Checkpoints have `visual.`; the module tree of newer versions `model.visual.`.
_PARTS = ((re.compile(r"(?:model\.)?visual\.(.+)"), ""),)


class Qwen2VLEncoder(NativeEncoder):
    """Tower and merger of one checkpoint."""

    config_class: ClassVar[Any] = Qwen2VLConfig
    rotary_class: ClassVar[Any] = Qwen2VLVisionRotaryEmbedding

    def _load(self, checkpoint: Checkpoint) -> None:
        config: Any = self.config_class.from_dict(checkpoint.config)
        vision = config.vision_config
        self._merge = int(vision.spatial_merge_size)
        self._patch_values = int(
            vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        )
        self._moments = int(vision.temporal_patch_size)
        settings = {**DEFAULTS, **checkpoint.image_processor_config}
        self._resizing = Resizing.read(settings, pixel_bounds(settings))
        self.hidden_size = int(config.text_config.hidden_size)
        weights = tower_weights(checkpoint, renamed(checkpoint, _PARTS))
        self._tower = QwenTower(weights, vision, self.rotary_class(vision), self._device)
        weights.finish()

    def cost(self, item: Item) -> int:
        """As the grid says. Raises BadPixels if pixel values and grid differ."""
        count = prod(item.grid)
        merges = item.grid[1] % self._merge == 0 and item.grid[2] % self._merge == 0
        widths = {self._patch_values}
        if item.scaling is not None:  # a picture stands still: one moment may stand for all
            widths.add(self._patch_values // self._moments)
        shapes = {(count, width) for width in widths}
        if min(item.grid) < 1 or not merges or item.pixels.shape not in shapes:
            raise BadPixels(
                f"pixel values are {list(item.pixels.shape)}; a grid of {list(item.grid)} patches"
                f" that are merged by {self._merge} asks for {[count, self._patch_values]}"
            )
        return count

    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        packed = pixel_values.patches(items, self._patch_values, self._device)
        made = self._tower(packed, [item.grid for item in items])
        return list(torch.split(made, [prod(item.grid) // self._merge**2 for item in items]))

    def sample(self, size: ItemSize) -> Item:
        """A black image or video."""
        columns, rows = self._resizing.merged(size.width, size.height)
        steps = max(1, -(-size.frames // self._moments))
        grid = (steps, rows * self._merge, columns * self._merge)
        return pixel_item(np.zeros((prod(grid), self._patch_values), np.float32), grid)
