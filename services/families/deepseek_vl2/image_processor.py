"""DeepSeek-VL2's image processor: the whole picture in one tile, then the tiles of the same picture larger."""

from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps

from services.families.deepseek_vl2.sizes import Tiling, padding_colour
from shared.artifacts.pixel_scaling import PixelScaling

Array = np.ndarray[Any, np.dtype[Any]]
_SIZES = ("side", "line", "resolutions")
_CHANNELS = 3


class TilesImageProcessor:
    """Called as the image processors of transformers. Pictures keep their shape; the mean colour fills the rest."""

    do_resize = False  # not the picture as a whole, once

    def __init__(self, **settings: Any) -> None:
        """settings: see `services.families.deepseek_vl2.sizes.processor`."""
        self._settings = settings
        self._tiling = Tiling(**{key: settings[key] for key in _SIZES})
        self._colour = padding_colour(settings["image_mean"])

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> "TilesImageProcessor":
        """As those of transformers."""
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """As those of transformers."""
        return self._settings

    def __call__(self, images: PIL.Image.Image, **options: Any) -> dict[str, list[Array]]:
        """`pixel_values` of one picture: [1 + tiles, 3, side, side], float32, or bytes where `options` say not to
        rescale and normalize."""
        picture, side = images.convert("RGB"), self._tiling.side
        columns, rows = self._tiling.grid(*picture.size)
        whole, large = (self._padded(picture, grid) for grid in ((1, 1), (columns, rows)))
        apart = large.reshape(rows, side, columns, side, _CHANNELS).swapaxes(1, 2)
        views = np.concatenate([whole[None], apart.reshape(-1, side, side, _CHANNELS)])
        pixels = np.ascontiguousarray(views.transpose(0, 3, 1, 2))
        settings = {**self._settings, **options}
        if not settings["do_rescale"]:
            return {"pixel_values": [pixels]}
        table = PixelScaling.of(settings, _CHANNELS).table()
        values = [table[channel][pixels[:, channel]] for channel in range(_CHANNELS)]
        return {"pixel_values": [np.stack(values, axis=1)]}

    def _padded(self, picture: PIL.Image.Image, grid: tuple[int, int]) -> Array:
        """Bytes [height, width, channels] of columns x rows tiles with the picture in their middle."""
        columns, rows = grid
        size = (columns * self._tiling.side, rows * self._tiling.side)
        return np.asarray(PIL.ImageOps.pad(picture, size, color=self._colour))
