"""Media of prompts, given as paths, URLs, bytes of files or pictures in memory, as what a request has for them."""

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Modes of pictures that PNG knows; others are converted to RGB.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_URLS = ("data:", "http://", "https://", "file:/")


def media_url(value: Any) -> str:
    """A URL, or the absolute path of a file, which preprocess reads itself. Raises ValueError for what is none of what
    is taken: a path or URL, bytes of a file, a PIL image; of a video also a list of images, its frames.
    """
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if isinstance(text, str):
            return text if text[:8].lower().startswith(_URLS) else _path(text)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"data:application/octet-stream;base64,{_base64(bytes(value))}"
    if _is_image(value):
        return f"data:image/png;base64,{_base64(_png(value))}"
    if isinstance(value, Sequence) and value and all(map(_is_image, value)):
        return f"data:video/png;base64,{','.join(_base64(_png(frame)) for frame in value)}"
    raise ValueError(
        f"an image or video must be a path, a URL, the bytes of a file or a PIL image, not {type(value).__name__}"
    )


def _path(text: str) -> str:
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return str(path)


def _is_image(value: Any) -> bool:
    """Whether it is a PIL image, without importing PIL for those who have none."""
    return hasattr(value, "save") and hasattr(value, "mode") and hasattr(value, "convert")


def _png(image: Any) -> bytes:
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
