"""Random pictures: smooth, so that they are as large in bytes as photographs of their size, not as noise."""

import base64
import io
import random

from PIL import Image

_CELLS = 12  # colours across a picture


class PictureMaker:
    """Makes pictures of one size and format."""

    def __init__(self, width: int, height: int, file_format: str) -> None:
        """`file_format` is "jpeg" or "png"."""
        self._size = (width, height)
        self._format = file_format

    def draw(self, source: random.Random) -> str:
        """A data URL; equal states of `source` give equal bytes."""
        colours = Image.frombytes("RGB", (_CELLS, _CELLS), source.randbytes(3 * _CELLS * _CELLS))
        picture = colours.resize(self._size, Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        picture.save(buffer, self._format)
        return f"data:image/{self._format};base64,{base64.b64encode(buffer.getvalue()).decode()}"
