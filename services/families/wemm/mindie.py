"""WeMM's pictures in MindIE-LLM's ids: pixel values [1, 3, height, width], zeros at the end of each edge up to whole
patches, and a mask [1, rows, columns] of the patches that show something."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.families.wemm.sizes import Resizing
from shared.errors import InvalidRequest

Array = np.ndarray[Any, np.dtype[Any]]

_BEGIN, _ROW, _END = -300, -200, -400
_CHANNELS = 3


class WeMMIds:
    """The separators' ids, and four codes in the places of the first rows between them."""

    dtypes: Sequence[type[np.generic]] = (np.float32, np.uint8)
    begin: int = _BEGIN
    fill: int = _ROW
    end: int | None = _END

    def __init__(self, resizing: Resizing) -> None:
        self._resizing = resizing

    def check(self, shapes: Sequence[tuple[int, ...]], tokens: int) -> None:
        """A picture of whole patches, and no patch more than its tokens stand for."""
        values, mask = shapes
        patch = self._resizing.patch
        if len(mask) != 3 or values != (1, _CHANNELS, mask[1] * patch, mask[2] * patch):
            raise _unusable(f"pixel values of shape {values} with a mask of {mask}")
        longest, _ = self._resizing.grid(self._resizing.longest, self._resizing.longest)
        if max(mask) > longest:
            raise _unusable(f"{mask[1]} rows and {mask[2]} columns of patches; {longest} are taken")

    def picture(self, tensors: Sequence[Array], tokens: int) -> Array:
        """Those patches that show something, [3, height, width]."""
        values, mask = tensors[0][0], tensors[1][0] != 0
        # A picture begins in its mask's first corner.
        rows, columns = int(mask[:, 0].sum()), int(mask[0].sum())
        if not mask[:rows, :columns].all() or mask.sum() != rows * columns or not rows * columns:
            raise _unusable("the mask shows no rectangle of patches from the first one on")
        wanted = self._resizing.rows_of(rows, columns)
        if tokens != wanted:
            raise _unusable(
                f"{tokens} ids for a picture of {rows} by {columns} patches, which has {wanted}"
            )
        patch = self._resizing.patch
        seen: Array = values[:, : rows * patch, : columns * patch]
        return seen

    def tensors(self, pixels: Array) -> Sequence[Array]:
        """Zeros are the middle of the values' range; or else what fills a patch in part is left out."""
        _, height, width = pixels.shape
        rows, columns = self._resizing.grid(width, height)
        patch = self._resizing.patch
        values = np.zeros((1, _CHANNELS, rows * patch, columns * patch), np.float32)
        seen = pixels[:, : rows * patch, : columns * patch]
        values[0, :, : seen.shape[1], : seen.shape[2]] = seen
        return (values, np.ones((1, rows, columns), np.uint8))


def _unusable(what: str) -> InvalidRequest:
    return InvalidRequest("IMAGE_UNUSABLE", what)
