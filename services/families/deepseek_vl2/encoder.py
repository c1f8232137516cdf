"""DeepSeek-VL2's encoder: SigLIP over a picture's tiles, whose rows are put together as one map.

Pixel values are [1 + tiles, 3, side, side]: the whole picture, then the tiles row by row.
"""

import re
from collections.abc import Sequence

import torch

from services.families.deepseek_vl2.sizes import Tiling
from services.families.deepseek_vl2.tower import DeepSeekVL2Tower
from services.families.deepseek_vl2.vision_config import VisionConfig
from services.vision_encoder.towers import pixel_values
from services.vision_encoder.towers.encoder import Item
from services.vision_encoder.towers.native_encoder import SizedEncoder
from services.vision_encoder.weights import renamed, tower_weights
from shared.checkpoint.folder import Checkpoint

_PARTS = ((re.compile(r"((?:vision|projector)\..+|image_newline|view_seperator)"), ""),)
_UNUSED = "vision.attn_pool."  # what pools all patches to one row


class DeepSeekVL2Encoder(SizedEncoder):
    """Tower, projector and marks of one checkpoint. All tiles are of one size: any may run together."""

    def _load(self, checkpoint: Checkpoint) -> None:
        config = VisionConfig.read(checkpoint)
        self._tiling = Tiling.read(checkpoint)
        self._tile = (3, config.image_size, config.image_size)
        self._patches = config.side**2
        self.hidden_size = config.text_size

        def unused(name: str) -> bool:
            return name.startswith(_UNUSED)

        ops = self._device.ops
        weights = tower_weights(checkpoint, renamed(checkpoint, _PARTS), unused)
        self._end = ops.vector(weights.take("image_newline", config.text_size))
        self._separator = ops.vector(weights.take("view_seperator", config.text_size))
        self._tower = DeepSeekVL2Tower(weights, config, ops)
        weights.finish()

    def _shape(self, width: int, height: int) -> tuple[int, ...]:
        return self._tiling.views(width, height), *self._tile

    def _rows(self, items: Sequence[Item]) -> list[torch.Tensor]:
        views = self._tower(pixel_values.squares(items, self._device))
        counts = [len(item.pixels) for item in items]
        apart = zip(items, torch.split(views, counts), strict=True)
        return [self._put_together(item, some) for item, some in apart]

    def _put_together(self, item: Item, views: torch.Tensor) -> torch.Tensor:
        """The whole picture's lines, the separator, the lines across all tiles [1 + tiles, rows, hidden_size]."""
        line = self._tiling.line
        columns, rows = self._tiling.grid(item.width, item.height)
        whole, *_ = maps = views.unflatten(1, (line, line))
        apart = maps[1:].unflatten(0, (rows, columns)).transpose(1, 2)
        across = apart.reshape(rows * line, columns * line, -1)
        return torch.cat([self._ended(whole), self._separator[None], self._ended(across)])

    def _ended(self, lines: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] of lines [lines, n, hidden_size], each with its end."""
        ends = self._end.expand(len(lines), 1, -1)
        return torch.cat([lines, ends], dim=1).flatten(0, 1)
