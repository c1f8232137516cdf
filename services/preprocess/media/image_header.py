"""Checks of a file's headers before any decoder reads it: sizes, scans, frames, compressed texts.

Pillow's own readers trust the file: libwebp has a canvas in memory before its
size is known, libjpeg goes over the whole picture for each scan of a few bytes. Files that are cut off or make no
sense pass here; the decoder reports what is wrong with them.
"""

import re
import struct

from services.preprocess.media.image_limits import ImageLimits, UnreadableImage

_MOST_PARTS = 1 << 16  # chunks, segments or blocks, which cost time of their own however small
_MOST_BLOCKS = 1 << 20  # GIF has at most 255 bytes in each
_MOST_PACKED = 64  # texts and profiles of a PNG, each of which may unpack to a megabyte

_PNG = b"\x89PNG\r\n\x1a\n"
_PACKED = (b"zTXt", b"iTXt", b"iCCP")
# In the data of a scan FF stands before 00 or a restart marker; before anything else it begins a segment.
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
_FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SCAN, _END = 0xDA, 0xD9
_WITHOUT_LENGTH = {0x01, 0xD8}


def check_header(data: bytes, limits: ImageLimits) -> None:
    """Raises UnreadableImage where the header alone shows that the picture exceeds a limit."""
    if data.startswith(_PNG):
        _walk_png(data)
    elif data.startswith(b"\xff\xd8\xff"):
        _check_jpeg(data, limits)
    elif _is_webp(data):
        size = _webp_size(data)
        if size is not None:
            limits.check(*size)
            limits.check_memory(*size, 20)


def check_animation(data: bytes, limits: ImageLimits) -> None:
    """The same for a file of which every frame is decoded."""
    check_header(data, limits)
    if data.startswith(_PNG):
        size = struct.unpack_from(">II", data, 16) if len(data) >= 24 else (0, 0)
        frames = _walk_png(data)
    elif _is_webp(data):
        size = _webp_size(data) or (0, 0)
        frames = _webp_frames(data)
    elif data.startswith((b"GIF87a", b"GIF89a")):
        size = struct.unpack_from("<HH", data, 6) if len(data) >= 10 else (0, 0)
        frames = _gif_frames(data)
    else:
        return
    if min(size) > 0:
        limits.check(*size)
        limits.check_animation(frames, *size)


def _walk_png(data: bytes) -> int:
    """How many frames it has. Raises UnreadableImage for too many chunks."""
    place, frames, packed, chunks = len(_PNG), 0, 0, 0
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        place += length + 12
        chunks += 1
        frames += kind == b"fcTL"
        packed += kind in _PACKED
        if packed > _MOST_PACKED:
            raise _too_many("PNG", "packed texts and profiles", _MOST_PACKED)
        if chunks > _MOST_PARTS:
            raise _too_many("PNG", "chunks", _MOST_PARTS)
        if kind == b"IEND":
            break
    return frames


def _check_jpeg(data: bytes, limits: ImageLimits) -> None:
    """Reads the file as libjpeg does: segments by their lengths, data between them by its markers."""
    place, segments, scans = 2, 0, 0
    size = (0, 0)
    while (found := _MARKER.search(data, place)) is not None:
        marker, place = found[1][0], found.end()
        if marker == _END:
            break
        if marker in _WITHOUT_LENGTH:
            continue
        if place + 2 > len(data):
            break
        (length,) = struct.unpack_from(">H", data, place)
        if marker in _FRAME_MARKERS and place + 7 <= len(data):
            height, width = struct.unpack_from(">HH", data, place + 3)
            size = (width, height)
        segments += 1
        scans += marker == _SCAN
        if segments > _MOST_PARTS:
            raise _too_many("JPEG", "segments", _MOST_PARTS)
        place += max(2, length)
    if min(size) > 0:
        limits.check(*size)
        limits.check_scans(scans, *size)


def _is_webp(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def _webp_size(data: bytes) -> tuple[int, int] | None:
    head = data[12:30]
    if len(head) < 18:
        return None
    if head[:4] == b"VP8X":
        return int.from_bytes(head[12:15], "little") + 1, int.from_bytes(head[15:18], "little") + 1
    if head[:4] == b"VP8L" and head[8] == 0x2F:
        bits = int.from_bytes(head[9:13], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if head[:4] == b"VP8 " and head[11:14] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", head, 14)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _webp_frames(data: bytes) -> int:
    place, frames, chunks = 12, 0, 0
    while place + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, place)
        place += 8 + length + length % 2
        chunks += 1
        frames += kind == b"ANMF"
        if chunks > _MOST_PARTS:
            raise _too_many("WebP", "chunks", _MOST_PARTS)
    return frames


def _gif_frames(data: bytes) -> int:
    place, frames, blocks = 13 + _gif_colours(data, 10), 0, 0
    while place < len(data) and data[place] != 0x3B:
        if data[place] == 0x2C:  # an image: its place, its colours, the width of its codes
            frames += 1
            place += 11 + _gif_colours(data, place + 9)
        elif data[place] == 0x21:  # an extension and its kind
            place += 2
        while place < len(data) and data[place]:
            place += data[place] + 1
            blocks += 1
            if blocks > _MOST_BLOCKS:
                break
        place += 1
        blocks += 1  # the empty one at the end, or a byte that readers skip
        if blocks > _MOST_BLOCKS:
            raise _too_many("GIF", "blocks", _MOST_BLOCKS)
    return frames


def _gif_colours(data: bytes, place: int) -> int:
    """Bytes of the colour table that the flags at `place` announce."""
    flags = data[place] if place < len(data) else 0
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _too_many(style: str, what: str, most: int) -> UnreadableImage:
    return UnreadableImage("IMAGE_TOO_LARGE", f"the {style} has more than {most} {what}")
