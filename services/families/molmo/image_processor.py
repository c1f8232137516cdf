"""Molmo's image processor: the whole picture and overlapping crops of it, each as rows of patches."""

from typing import Any

import numpy as np
import PIL.Image

from services.families.molmo.sizes import Cropping, Fitting

Array = np.ndarray[Any, np.dtype[np.float32]]
_SETTINGS = ("side", "patch", "before", "after", "most")


class MolmoImageProcessor:
    """Called as the image processors of transformers. Pictures are resized as numbers between 0 and 1, not as bytes,
    and keep their shape; black fills the rest."""

    do_resize = False  # not the picture as a whole, once

    def __init__(self, **settings: Any) -> None:
        """settings: see `services.families.molmo.sizes.processor`."""
        self._settings = settings
        self._cropping = Cropping(**{key: settings[key] for key in _SETTINGS})
        self._mean = np.array(settings["image_mean"], np.float32)
        self._deviation = np.array(settings["image_std"], np.float32)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> "MolmoImageProcessor":
        """As those of transformers."""
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """As those of transformers."""
        return self._settings

    def __call__(self, images: PIL.Image.Image, **options: Any) -> dict[str, list[Array]]:
        """`pixel_values` of one picture: float32 [1 + crops, patches, values], a patch's pixels row by row, of each its
        channels."""
        picture, cropping = images.convert("RGB"), self._cropping
        tiling = cropping.tiling(*picture.size)
        height, width = (edge * cropping.patch for edge in cropping.grid(tiling))
        side, step = cropping.side, cropping.window * cropping.patch
        large = self._fitted(picture, (height, width))
        views = [self._fitted(picture, (side, side))]
        for top in range(0, tiling[0] * step, step):
            for left in range(0, tiling[1] * step, step):
                views.append(large[top : top + side, left : left + side])
        return {"pixel_values": [np.stack([self._patches(view) for view in views])]}

    def _fitted(self, picture: PIL.Image.Image, outer: tuple[int, int]) -> Array:
        """Normed values [height, width, channels] of the picture within `outer`."""
        fitting = Fitting.of(*picture.size, outer)
        (top, left), (rows, columns) = fitting.start, fitting.inner
        values: Array = np.zeros((*outer, len(self._mean)), np.float32)
        for channel in range(len(self._mean)):
            numbers = np.asarray(picture.getchannel(channel), np.float32) / np.float32(255)
            resized = PIL.Image.fromarray(numbers).resize(
                (columns, rows), PIL.Image.Resampling.BILINEAR
            )
            values[top : top + rows, left : left + columns, channel] = np.asarray(resized)
        values -= self._mean
        values /= self._deviation
        return values

    def _patches(self, view: Array) -> Array:
        count, patch = self._cropping.patches, self._cropping.patch
        apart = view.reshape(count, patch, count, patch, -1).transpose(0, 2, 1, 3, 4)
        rows: Array = apart.reshape(count * count, -1)
        return rows
