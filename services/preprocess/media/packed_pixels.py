"""The packed form of pixel values that a client has made itself: one file, with a digest, stored and made into an
artifact again like an image.

0  8s   magic TSRPIXL
8  u32  prompt tokens that stand for the picture
12 u32  channels
16 u32  height
20 u32  width
24      float32 [channels, height, width], little-endian
"""

import struct
from typing import Any

import numpy as np

Pixels = np.ndarray[Any, np.dtype[np.float32]]

_MAGIC = b"TSRPIXL\x01"
_HEAD = struct.Struct("<8s4I")


def pack(pixels: np.ndarray[Any, np.dtype[Any]], tokens: int) -> bytes:
    """Packs float32 [channels, height, width]."""
    return _HEAD.pack(_MAGIC, tokens, *pixels.shape) + pixels.astype("<f4", copy=False).tobytes()


def is_packed(data: bytes) -> bool:
    """Whether data is a packed picture."""
    return data.startswith(_MAGIC)


def unpack(data: bytes) -> tuple[Pixels, int]:
    """The pixel values and their tokens. Raises ValueError for what `pack` did not write."""
    if len(data) < _HEAD.size:
        raise ValueError("the pixel values are cut off")
    _, tokens, *shape = _HEAD.unpack_from(data)
    return np.frombuffer(data, "<f4", offset=_HEAD.size).reshape(shape).astype(np.float32), tokens
