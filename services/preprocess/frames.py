"""A video as one file: its frames' files one after the other, with the time between them.

0  8s   magic
8  f32  seconds from one frame to the next
12 u32  number of frames
16      for each frame u32 bytes, then the file

So a video has one digest, is kept and made again like an image, and its pace, which positions may
depend on, is part of its name.
"""

import struct
from collections.abc import Sequence

MAGIC = b"TSRFRMS\x01"
_HEAD = struct.Struct("<8sfI")
_LENGTH = struct.Struct("<I")


def pack(frames: Sequence[bytes], seconds_per_frame: float) -> bytes:
    """The file of a video."""
    parts = [_HEAD.pack(MAGIC, seconds_per_frame, len(frames))]
    for frame in frames:
        parts += [_LENGTH.pack(len(frame)), frame]
    return b"".join(parts)


def is_packed(data: bytes) -> bool:
    """Whether a file is a video of ours."""
    return data.startswith(MAGIC)


def unpack(data: bytes) -> list[bytes]:
    """The frames' files. Raises ValueError for what `pack` did not write."""
    try:
        _, _, count = _HEAD.unpack_from(data)
        place, frames = _HEAD.size, []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, place)
            place += _LENGTH.size + length
            frames.append(data[place - length : place])
    except struct.error as error:
        raise ValueError("the file of frames is cut off") from error
    if not frames or place != len(data):
        raise ValueError("the file of frames is not whole")
    return frames
