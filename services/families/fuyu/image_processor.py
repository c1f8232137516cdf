"""Fuyu's image processor: a picture as rows of patches. That of transformers needs torch for them."""

from typing import Any

import numpy as np
import PIL.Image

from services.families.fuyu.sizes import CHANNELS, Patching
from shared.artifacts.pixel_scaling import PixelScaling

Array = np.ndarray[Any, np.dtype[Any]]
_SIZES = ("height", "width", "patch")


class FuyuImageProcessor:
    """Called as the image processors of transformers."""

    do_resize = False  # not every picture to the same size

    def __init__(self, **settings: Any) -> None:
        """settings: see `services.families.fuyu.sizes.processor`."""
        self._settings = settings
        self._patching = Patching(**{key: settings[key] for key in _SIZES})

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> "FuyuImageProcessor":
        """As those of transformers."""
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """As those of transformers."""
        return self._settings

    def __call__(
        self, images: PIL.Image.Image, do_rescale: bool = True, do_normalize: bool = True, **_: Any
    ) -> dict[str, list[Array]]:
        """`pixel_values` of one picture: [patches, values], row by row, of a patch its pixels row by row, of a pixel
        its channels. float32, or bytes without rescaling and norming."""
        pixels = self._patches(images.convert("RGB"))
        if do_rescale or do_normalize:
            asked = {"do_rescale": do_rescale, "do_normalize": do_normalize}
            table = PixelScaling.of({**self._settings, **asked}, CHANNELS).table()
            apart = pixels.reshape(-1, CHANNELS)
            scaled = [table[channel][apart[:, channel]] for channel in range(CHANNELS)]
            pixels = np.stack(scaled, -1).reshape(pixels.shape)
        return {"pixel_values": [pixels]}

    def _patches(self, picture: PIL.Image.Image) -> Array:
        """Bytes. What the last row and the last column of patches lack is filled before rescaling."""
        patching, settings = self._patching, self._settings
        size = patching.shrunk(*picture.size)
        rows, columns = patching.grid(*picture.size)
        if size != picture.size:
            picture = picture.resize(size, PIL.Image.Resampling(settings["resample"]))
        patch, (width, height) = patching.patch, size
        shape = (rows * patch, columns * patch, CHANNELS)
        whole = np.full(shape, settings["padding_value"], np.uint8)
        whole[:height, :width] = np.asarray(picture)
        apart = whole.reshape(rows, patch, columns, patch, CHANNELS).transpose(0, 2, 1, 3, 4)
        return apart.reshape(rows * columns, patching.values)
