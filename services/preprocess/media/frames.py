"""A video as one file, so that it has one digest and is kept and made again like an image.

Frames, one after the other, with the time between them:

0  8s   magic TSRFRMS
8  f32  seconds from one frame to the next
12 u32  number of frames
16      for each frame u32 bytes, then the file

A film, with how frames are taken from it:

0  8s   magic TSRFILM
8  f32  frames wanted for each second
12 u32  frames wanted at least
16 u32  frames wanted at most
20 u32  multiple that their number is rounded down to
24      the file

The pace, which positions may depend on, and the choice of frames are part of the video's name.
"""

import struct
from collections.abc import Sequence

from services.preprocess.media.frame_selection import Sampling

_FRAMES = b"TSRFRMS\x01"
_FILM = b"TSRFILM\x01"
_FRAMES_HEAD = struct.Struct("<8sfI")
_FILM_HEAD = struct.Struct("<8sfIII")
_LENGTH = struct.Struct("<I")


def pack(frames: Sequence[bytes], seconds_per_frame: float) -> bytes:
    """The file of a video that came as frames."""
    parts = [_FRAMES_HEAD.pack(_FRAMES, seconds_per_frame, len(frames))]
    for frame in frames:
        parts += [_LENGTH.pack(len(frame)), frame]
    return b"".join(parts)


def pack_film(file: bytes, sampling: Sampling) -> bytes:
    """The file of a video that came as a file."""
    head = (sampling.fps, sampling.min_frames, sampling.max_frames, sampling.multiple)
    return _FILM_HEAD.pack(_FILM, *head) + file


def is_packed(data: bytes) -> bool:
    """Whether a file is a video of ours, of either kind."""
    return data.startswith((_FRAMES, _FILM))


def is_film(data: bytes) -> bool:
    """Whether a video of ours holds a file that frames are to be taken from."""
    return data.startswith(_FILM)


def unpack(data: bytes) -> tuple[list[bytes], float]:
    """The frames' files and their pace. Raises ValueError for what `pack` did not write."""
    try:
        _, pace, count = _FRAMES_HEAD.unpack_from(data)
        place, frames = _FRAMES_HEAD.size, []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, place)
            place += _LENGTH.size + length
            frames.append(data[place - length : place])
    except struct.error as error:
        raise ValueError("the file of frames is cut off") from error
    if not frames or place != len(data):
        raise ValueError("the file of frames is not whole")
    return frames, pace


def unpack_film(data: bytes) -> tuple[bytes, Sampling]:
    """The file and how frames are taken from it."""
    _, *head = _FILM_HEAD.unpack_from(data)
    return data[_FILM_HEAD.size :], Sampling(*head)
