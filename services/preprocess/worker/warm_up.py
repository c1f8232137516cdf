"""Decodes one small file of each kind, so that everything that Pillow loads on demand is loaded.

A confined image worker can open no files, Python's modules among them.
"""

import contextlib
import encodings.cp437
import encodings.latin_1
import encodings.utf_16
import encodings.utf_16_be
import encodings.utf_16_le  # noqa: F401  (texts beside pictures are written in all of these)
import importlib
import io
import pkgutil

import PIL.Image

from services.preprocess.media import image_decoder
from services.preprocess.media.frame_selection import FrameSelection
from services.preprocess.media.image_decoder import FORMATS
from services.preprocess.media.image_limits import ImageLimits, UnreadableImage
from services.preprocess.media.video import open_video

# Loaded by Pillow's JPEG reader for files of two pictures, as telephones write them.
_LATE = ("PIL.MpoImagePlugin",)
_LIMITS = ImageLimits(max_pixels=1 << 20)


def warm_up() -> None:
    """Decodes pictures in every format, upright and turned, deep and transparent, and an animation."""
    for module in _LATE:
        importlib.import_module(module)
    with contextlib.suppress(ImportError):  # it is optional
        _load_pyav()
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    picture = PIL.Image.new("RGB", (16, 16))
    for style in FORMATS:
        options = {} if style in ("GIF", "BMP") else {"exif": exif}
        image_decoder.decode(_file(picture, style, **options), _LIMITS)
    for mode in ("I;16", "RGBA", "P", "LA", "1"):
        image_decoder.decode(_file(PIL.Image.new(mode, (16, 16)), "PNG"), _LIMITS)
    image_decoder.decode(_file(picture, "JPEG", progressive=True), _LIMITS)
    image_decoder.decode(_file(picture, "TIFF", compression="tiff_lzw"), _LIMITS)
    for style in ("GIF", "WEBP", "PNG"):
        moving = _file(
            picture, style, save_all=True, append_images=[PIL.Image.new("RGB", (16, 16), 9)]
        )
        list(open_video(moving, FrameSelection(), _LIMITS).frames)
    for wrong in (b"", b"nothing that is known", _file(picture, "PNG")[:60]):
        with contextlib.suppress(UnreadableImage):
            image_decoder.decode(wrong, _LIMITS)


def _load_pyav() -> None:
    """All of it: its modules import each other when they first meet a kind of stream."""
    import av

    importlib.import_module("services.preprocess.media.video_container")
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _file(image: PIL.Image.Image, style: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, style, **options)
    return buffer.getvalue()
