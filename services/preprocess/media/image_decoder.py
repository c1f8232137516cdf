"""Decodes image files to upright RGB pictures. Runs in the image worker, where a crash costs one request."""

import contextlib
import io
import warnings

import numpy as np
import PIL.BmpImagePlugin
import PIL.GifImagePlugin
import PIL.Image
import PIL.ImageOps
import PIL.JpegImagePlugin
import PIL.PngImagePlugin
import PIL.TiffImagePlugin
import PIL.WebPImagePlugin

from services.preprocess.media.image_header import check_header
from services.preprocess.media.image_limits import ImageLimits, NeedsMoreMemory, UnreadableImage

# Pillow's other decoders are not loaded: each would add attack surface for untrusted files.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

# Rows converted at a time: converting whole pictures would hold several copies in memory.
_STRIP = 256

# The limit of pixels below replaces Pillow's warning.
PIL.Image.MAX_IMAGE_PIXELS = None


def decode(data: bytes, limits: ImageLimits, upright: bool = True) -> PIL.Image.Image:
    """The picture as RGB: first frame, EXIF orientation applied unless not `upright`, transparency over white.

    Raises UnreadableImage.
    """
    try:
        check_header(data, limits)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
            limits.check(*image.size)
            limits.check_memory(*image.size, bytes_per_pixel(image.format))
            image.load()
        return rgb(_upright(image) if upright else image)
    except UnreadableImage:
        raise
    except MemoryError as error:
        raise NeedsMoreMemory("image", limits.memory_bytes) from error
    except PIL.UnidentifiedImageError as error:
        raise UnreadableImage(
            "IMAGE_FORMAT", "this is not an image file (PNG, JPEG, WebP, GIF, BMP and TIFF are)"
        ) from error
    except Exception as error:  # Pillow's decoders raise anything on damaged files
        raise UnreadableImage("IMAGE_DAMAGED", f"the image file is damaged: {error}") from error


def _upright(image: PIL.Image.Image) -> PIL.Image.Image:
    with contextlib.suppress(Exception):  # damaged EXIF says nothing about the orientation
        PIL.ImageOps.exif_transpose(image, in_place=True)
    return image


def bytes_per_pixel(style: str | None) -> int:
    """Memory for a pixel at the worst moment, for a format by Pillow's name.

    Four bytes each for the picture, the same turned upright or whatever its decoder holds beside it, and
    what becomes of it; libwebp has two canvases more and hands over a copy.
    """
    return 20 if style == "WEBP" else 12


def rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Eight bits of three colours, transparency over white. Raises UnreadableImage."""
    if image.mode == "F":
        raise UnreadableImage(
            "IMAGE_FORMAT", "images of floating-point numbers are not taken; save 8 or 16 bits"
        )
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if not (image.mode.startswith("I") or image.has_transparency_data):
        return image.convert("RGB")
    made = PIL.Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP):
        box = (0, top, image.width, min(top + _STRIP, image.height))
        made.paste(_strip(image.crop(box)), box)
    return made


def _strip(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode.startswith("I"):
        image = _from_16_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = PIL.Image.alpha_composite(white, image)
    return image.convert("RGB")


def _from_16_bits(image: PIL.Image.Image) -> PIL.Image.Image:
    """Keeps the upper 8 of 16 bits; Pillow's own conversion cuts values above 255 off."""
    values = np.asarray(image).astype(np.int64).clip(0, 65535) >> 8
    return PIL.Image.fromarray(values.astype(np.uint8))
