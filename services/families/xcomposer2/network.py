"""XComposer2's vision part: CLIP's last hidden states, then a perceptron; of 4KHD four patches as one, with marks at
the ends of lines (InternLM-XComposer, `build_mlp.py`)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.families.xcomposer2.sizes import TILE
from services.vision_encoder.towers.llava_network import Tower
from shared.model_config.llava import TowerConfig

_JOINED = 2  # patches of an edge that become one row, in tiles


class XComposer2Network(nn.Module):
    """Tensor names as in checkpoints, with `tower` and `projector` for their long prefixes."""

    def __init__(self, config: TowerConfig, text_size: int, tiled: bool) -> None:
        """text_size: width of the language model."""
        super().__init__()
        width = config.hidden_size * (_JOINED**2 if tiled else 1)
        self.tower = Tower(config, config.num_layers)
        self.projector = nn.Sequential(
            nn.Linear(width, text_size), nn.GELU(), nn.Linear(text_size, text_size)
        )
        if tiled:
            self.plora_glb_gn = nn.Parameter(torch.empty(1, 1, width))
            self.plora_sub_gn = nn.Parameter(torch.empty(1, 1, 1, width))
        self._tiled = tiled

    def forward(self, pixels: Tensor) -> Tensor:
        """Rows [rows, width of the language model] of one picture [3, height, width]."""
        rows = self._lines(pixels) if self._tiled else self._patches(pixels[None])[0]
        made: Tensor = self.projector(rows)
        return made

    def _patches(self, squares: Tensor) -> Tensor:
        """[n, patches, width]: without the class token."""
        states: Tensor = self.tower(squares)[-1]
        return states[:, 1:]

    def _lines(self, pixels: Tensor) -> Tensor:
        """The whole picture's lines, a mark, the lines across all tiles."""
        # As upstream: without antialiasing, of values that are normalised already.
        whole = F.interpolate(pixels[None].float(), size=(TILE, TILE), mode="bicubic")
        rows, columns = pixels.shape[1] // TILE, pixels.shape[2] // TILE
        apart = pixels.reshape(3, rows, TILE, columns, TILE).permute(1, 3, 0, 2, 4).flatten(0, 1)
        joined = _join(self._patches(torch.cat([whole.to(pixels.dtype), apart])))
        side = joined.shape[1]
        across = joined[1:].reshape(rows, columns, side, side, -1).transpose(1, 2)
        across = across.reshape(rows * side, columns * side, -1)
        return torch.cat([self._ended(joined[0]), self.plora_glb_gn[0], self._ended(across)])

    def _ended(self, grid: Tensor) -> Tensor:
        """[rows, width] of lines [lines, n, width], each with its mark."""
        marks = self.plora_sub_gn[0].expand(len(grid), 1, -1)
        return torch.cat([grid, marks], dim=1).flatten(0, 1)


def _join(patches: Tensor) -> Tensor:
    """Squares of patches [n, side * side, width] as [n, side / 2, side / 2, 4 * width], line by line."""
    side = int(patches.shape[1] ** 0.5) // _JOINED
    apart = patches.reshape(len(patches), side, _JOINED, side, _JOINED, -1)
    return apart.transpose(2, 3).reshape(len(patches), side, side, -1)
