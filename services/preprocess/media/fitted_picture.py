"""The packed form of a picture that is fitted into a square before the image processor sees it: one file, with a digest
other than that of the picture alone.

0  8s   magic TSRSQUA
8  u32  side of the square in pixels
12 3B   colour of what the picture does not fill: red, green, blue
15      the picture's file
"""

import struct
from dataclasses import dataclass

_MAGIC = b"TSRSQUA\x01"
_HEAD = struct.Struct("<8sI3B")


@dataclass(frozen=True)
class Square:
    """`side` in pixels; `colour` of what a picture does not fill. It stands in the middle, as large as it fits."""

    side: int
    colour: tuple[int, int, int]

    def pack(self, file: bytes) -> bytes:
        """Packs a picture's file."""
        return _HEAD.pack(_MAGIC, self.side, *self.colour) + file


def is_packed(data: bytes) -> bool:
    """Whether data is a packed picture."""
    return data.startswith(_MAGIC)


def unpack(data: bytes) -> tuple[Square, bytes]:
    """The square and the picture's file. Raises ValueError for what `Square.pack` did not write."""
    if len(data) < _HEAD.size:
        raise ValueError("the picture is cut off")
    _, side, *colour = _HEAD.unpack_from(data)
    return Square(side, (colour[0], colour[1], colour[2])), data[_HEAD.size :]
