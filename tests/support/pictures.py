"""Pictures to ask about."""

import base64
import io
from collections.abc import Sequence

from PIL import Image, ImageDraw


def png(number: int = 0, size: tuple[int, int] = (144, 144)) -> bytes:
    """A PNG file with a coloured square; each number gives another one."""
    colour = (37 * number % 256, 91 * number % 256, (151 * number + 40) % 256)
    picture = Image.new("RGB", size, "white")
    left, top = 10 + number % 40, 10 + number // 40 % 40
    ImageDraw.Draw(picture).rectangle((left, top, left + 70, top + 70), fill=colour)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def data_url(picture: bytes) -> str:
    """The bytes of a PNG file as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def animation(pictures: Sequence[bytes], pace_ms: int, style: str = "PNG") -> bytes:
    """An animated file of pictures that are each shown for so long."""
    first, *rest = [Image.open(io.BytesIO(picture)) for picture in pictures]
    file = io.BytesIO()
    options = {"lossless": True} if style == "WEBP" else {}
    first.save(file, style, save_all=True, append_images=rest, duration=pace_ms, loop=0, **options)
    return file.getvalue()
