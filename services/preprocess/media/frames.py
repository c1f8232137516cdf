"""The packed form of a video: one file, so that it has one digest and is stored and processed again like an image.

Frames, one after the other, with the time between them:

0  8s   magic TSRFRMS
8  f32  seconds from one frame to the next
12 u32  number of frames
16      for each frame u32 bytes, then the file

A video file, with the selection of its frames:

0  8s   magic TSRVIDF
8  f32  frames wanted for each second
12 u32  frames wanted at least
16 u32  frames wanted at most
20 u32  multiple that their number is rounded down to
24      the file

The seconds per frame, which positions may depend on, and the frame selection are part of the digest.
"""

import struct
from collections.abc import Sequence

from services.preprocess.media.frame_selection import FrameSelection

_FRAMES = b"TSRFRMS\x01"
_VIDEO = b"TSRVIDF\x01"
_FRAMES_HEAD = struct.Struct("<8sfI")
_VIDEO_HEAD = struct.Struct("<8sfIII")
_LENGTH = struct.Struct("<I")


def pack(frames: Sequence[bytes], seconds_per_frame: float) -> bytes:
    """Packs a video that the client sent as frames."""
    parts = [_FRAMES_HEAD.pack(_FRAMES, seconds_per_frame, len(frames))]
    for frame in frames:
        parts += [_LENGTH.pack(len(frame)), frame]
    return b"".join(parts)


def pack_video_file(file: bytes, selection: FrameSelection) -> bytes:
    """Packs a video that the client sent as a file."""
    head = (selection.fps, selection.min_frames, selection.max_frames, selection.multiple)
    return _VIDEO_HEAD.pack(_VIDEO, *head) + file


def is_packed(data: bytes) -> bool:
    """Whether data is a packed video, of either kind."""
    return data.startswith((_FRAMES, _VIDEO))


def is_video_file(data: bytes) -> bool:
    """Whether a packed video holds a video file."""
    return data.startswith(_VIDEO)


def unpack(data: bytes) -> tuple[list[bytes], float]:
    """The frames' files and the seconds per frame. Raises ValueError for what `pack` did not write."""
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


def unpack_video_file(data: bytes) -> tuple[bytes, FrameSelection]:
    """The video file and its frame selection."""
    _, *head = _VIDEO_HEAD.unpack_from(data)
    return data[_VIDEO_HEAD.size :], FrameSelection(*head)
