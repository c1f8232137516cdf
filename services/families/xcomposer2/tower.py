"""XComposer2's vision part: CLIP's last hidden states, then a perceptron; of 4KHD four patches as one, with marks at
the ends of lines (InternLM-XComposer, `build_mlp.py`)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from services.families.xcomposer2.sizes import LINE_MARK, TILE, WHOLE_MARK
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.towers.blocks import patch_rows
from services.vision_encoder.towers.clip_tower import clip_tower
from shared.model_config.llava import TowerConfig
from shared.weights.named_weights import NamedWeights

_JOINED = 2  # patches of an edge that become one row, in tiles


class XComposer2Tower:
    """Pictures to rows."""

    def __init__(
        self, weights: NamedWeights, config: TowerConfig, text_size: int, tiled: bool, ops: TowerOps
    ) -> None:
        """weights: tensors `tower`.X, `projector`.X and, with tiles, the two marks. text_size: width of the language
        model."""
        self._ops, self._config, self._tiled = ops, config, tiled
        self._tower = clip_tower(weights, config, config.num_layers, ops)
        width = config.hidden_size * (_JOINED**2 if tiled else 1)
        self._up = ops.pack(weights.take_linear("projector.0", text_size, width, True), "gelu")
        self._down = ops.pack(weights.take_linear("projector.2", text_size, text_size, True))
        if tiled:
            self._whole_mark = ops.vector(weights.take(WHOLE_MARK, 1, 1, width)[0])
            self._line_mark = ops.vector(weights.take(LINE_MARK, 1, 1, 1, width)[0])

    def __call__(self, pictures: Sequence[Tensor]) -> list[Tensor]:
        """Rows [rows, width of the language model] of each picture [1, 3, height, width]."""
        squares = [_squares(picture) if self._tiled else picture for picture in pictures]
        patches = patch_rows(torch.cat(squares), self._config.patch_size)
        states = self._tower(patches)[self._config.num_layers][:, 1:]
        apart = torch.split(states, [len(some) for some in squares])
        if self._tiled:
            pairs = zip(pictures, apart, strict=True)
            found = [self._lines(picture, some) for picture, some in pairs]
        else:
            found = [some[0] for some in apart]
        rows = self._ops.linear(torch.cat(found), self._up)
        return list(torch.split(self._ops.linear(rows, self._down), [len(rows) for rows in found]))

    def _lines(self, picture: Tensor, states: Tensor) -> Tensor:
        """The whole picture's lines, a mark, the lines across all tiles, of states [1 + tiles, patches, hidden]."""
        joined = _join(states)
        rows, columns = picture.shape[2] // TILE, picture.shape[3] // TILE
        side = joined.shape[1]
        across = joined[1:].reshape(rows, columns, side, side, -1).transpose(1, 2)
        across = across.reshape(rows * side, columns * side, -1)
        return torch.cat([self._ended(joined[0]), self._whole_mark, self._ended(across)])

    def _ended(self, grid: Tensor) -> Tensor:
        """[rows, width] of lines [lines, n, width], each with its mark."""
        marks = self._line_mark.expand(len(grid), 1, -1)
        return torch.cat([grid, marks], dim=1).flatten(0, 1)


def _squares(picture: Tensor) -> Tensor:
    """[1 + tiles, 3, TILE, TILE]: the whole picture, then its tiles line by line."""
    # As upstream: without antialiasing, of values that are normalised already.
    whole = F.interpolate(picture.float(), size=(TILE, TILE), mode="bicubic").to(picture.dtype)
    rows, columns = picture.shape[2] // TILE, picture.shape[3] // TILE
    apart = picture.reshape(3, rows, TILE, columns, TILE).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return torch.cat([whole, apart])


def _join(patches: Tensor) -> Tensor:
    """Squares of patches [n, side * side, width] as [n, side / 2, side / 2, 4 * width], line by line."""
    side = int(patches.shape[1] ** 0.5) // _JOINED
    apart = patches.reshape(len(patches), side, _JOINED, side, _JOINED, -1)
    return apart.transpose(2, 3).reshape(len(patches), side, side, -1)
