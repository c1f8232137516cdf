"""Molmo2's crops: the whole image as one square, then overlapping squares of a larger version of it.

A canvas has room for a number of windows each way and for the margins at its outer edges; every crop is one window with
margins on all sides. Images are stretched to the canvas, and to the square of the whole view. Cells are made of patches
of the whole view, then of the canvas; what is missing to a whole number of cells is -1, half of it before and half,
the larger one, behind. A patch that several crops have is taken from the one that has it inside its margins.

Assumption: resizing is torch's bilinear of pixels from 0 to 255 without antialias, rounded to bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Crops:
    """pixels float32 [1 + crops, patches, values]; pooling [tokens, patches of a token]; grid: rows and columns of
    tokens of the whole view, then of the crops."""

    pixels: Tensor
    pooling: list[list[int]]
    grid: list[int]


@dataclass(frozen=True)
class Molmo2Images:
    """`margins`: patches before and behind the window of a crop; `pool`: patches of a token, down and across."""

    side: int = 378
    patch: int = 14
    margins: tuple[int, int] = (4, 4)
    most: int = 8
    pool: tuple[int, int] = (2, 2)
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    std: Sequence[float] = (0.5, 0.5, 0.5)

    def __call__(self, image: Image) -> Crops:
        """All of one RGB image."""
        rows, columns = self.tiling(image.width, image.height)
        edge, step = self.side // self.patch, self._window * self.patch
        canvas = self._resized(image, rows * step + sum(self.margins) * self.patch,
                               columns * step + sum(self.margins) * self.patch)  # fmt: skip
        views = [self._resized(image, self.side, self.side)]
        for row in range(rows):
            for column in range(columns):
                part = canvas[row * step :, column * step :]
                views.append(part[: self.side, : self.side])
        whole = [[y * edge + x for x in range(edge)] for y in range(edge)]
        owned = self._owned(rows, columns)
        first, second = self._cells(whole), self._cells(owned)
        grid = [-(-len(part[i]) // n) if i else -(-len(part) // n)
                for part in (whole, owned) for i, n in enumerate(self.pool)]  # fmt: skip
        pixels = torch.stack([self._patches(view) for view in views])
        return Crops(pixels, [*first, *second], grid)

    def tiling(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of crops: least enlargement, else least reduction; ties go to fewer crops, then to fewer
        rows."""
        best, best_scale, fits = (1, 1), np.float32(0), False
        found = [(r, c) for r in range(1, self.most + 1) for c in range(1, self.most // r + 1)]
        margins = sum(self.margins) * self.patch
        for number, tiling in enumerate(sorted(found, key=lambda t: (t[0] * t[1], t[0]))):
            with np.errstate(divide="ignore"):
                scale = min(
                    np.float32(count * self._window * self.patch) / np.float32(size - margins)
                    for count, size in zip(tiling, (height, width), strict=True)
                )
            enlarges = bool(scale >= 1)
            better = scale < best_scale if enlarges and fits else scale > best_scale
            if number == 0 or (enlarges and not fits) or (enlarges == fits and better):
                best, best_scale, fits = tiling, scale, enlarges
        return best

    @property
    def _window(self) -> int:
        return self.side // self.patch - sum(self.margins)

    def _owned(self, rows: int, columns: int) -> list[list[int]]:
        """Of each patch of the canvas its number among the patches of all crops."""
        edge = self.side // self.patch

        def owner(place: int, count: int) -> tuple[int, int]:
            for crop in range(count):
                inside = place - crop * self._window
                low = self.margins[0] if crop else 0
                high = edge - (self.margins[1] if crop < count - 1 else 0)
                if low <= inside < high:
                    return crop, inside
            raise AssertionError("no crop has it")

        def number(y: int, x: int) -> int:
            (row, inner_y), (column, inner_x) = owner(y, rows), owner(x, columns)
            return edge * edge * (1 + row * columns + column) + inner_y * edge + inner_x

        height, width = (count * self._window + sum(self.margins) for count in (rows, columns))
        return [[number(y, x) for x in range(width)] for y in range(height)]

    def _cells(self, patches: list[list[int]]) -> list[list[int]]:
        down, across = self.pool
        height, width = len(patches), len(patches[0])
        top, left = (-height % down) // 2, (-width % across) // 2

        def at(y: int, x: int) -> int:
            return patches[y][x] if 0 <= y < height and 0 <= x < width else -1

        return [
            [at(y + i, x + j) for i in range(down) for j in range(across)]
            for y in range(-top, height, down)
            for x in range(-left, width, across)
        ]

    def _resized(self, image: Image, height: int, width: int) -> Tensor:
        """Normed values [height, width, 3]."""
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        stretched = functional.interpolate(pixels, (height, width), mode="bilinear")
        levels = stretched[0].round().clamp(0, 255).permute(1, 2, 0)
        return (levels - 255 * torch.tensor(self.mean)) / (255 * torch.tensor(self.std))

    def _patches(self, view: Tensor) -> Tensor:
        places = range(0, self.side, self.patch)
        return torch.stack(
            [view[y : y + self.patch, x : x + self.patch].flatten() for y in places for x in places]
        )
