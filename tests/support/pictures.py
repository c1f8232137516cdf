"""Pictures to ask about."""

import base64
import io

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
