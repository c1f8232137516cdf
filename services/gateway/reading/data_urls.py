"""Media inside a request's body, which may be most of it: taken out before the JSON is read, and
decoded in a thread and in slices after the request has been admitted to the queue's limits.

On the event loop, a body with a picture of 7.5 MB would delay every other request by a tenth of a
second: 9 ms for the JSON, 40 for base64, and as many for copies of the result.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from services.gateway.reading.decode import decode
from services.gateway.reading.list_limits import MOST_FRAMES
from services.gateway.reading.media import (
    FRAME_KINDS,
    data_url_head,
    is_data_url,
    read_video_frames,
)
from shared.environment import random_hex
from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import Media, Part, PrepareRequest, Video

_LARGE = 4096
_INLINE = 64 << 10
# Base64 characters decoded at a time: about a millisecond.
_SLICE = 256 << 10
_OPENING = b'"data:'
_FIELD = re.compile(rb'"(?:url|image_url|video_url)"\s*:\s*\Z')
_LONGEST_FIELD = 64
_LONGEST_HEAD = 256
# A body with more is mostly text.
_MOST_QUOTES = 20_000


_B = TypeVar("_B", bound=msgspec.Struct, covariant=True)


@dataclass(slots=True)
class InlineMedia:
    """The data of data URLs that were taken out of a body. In their places stand tickets."""

    ticket: str = ""
    pieces: list[bytes] = field(default_factory=list)

    def find(self, data: str) -> bytes | None:
        """The data behind a ticket; None for what is none."""
        if not self.pieces or not data.startswith(self.ticket):
            return None
        return self.pieces[int(data[len(self.ticket) :])]


@dataclass(frozen=True, slots=True)
class DecodedBody(Generic[_B]):
    """A body, the JSON that it was decoded from, and the media for which that has tickets."""

    content: _B
    json: bytes
    media: InlineMedia


def decode_with_media(
    body: bytes, kind: type[_B], urls: Callable[[_B], Iterable[str]]
) -> DecodedBody[_B]:
    """Decodes a body that may hold media; `urls` finds those that it reads media from. Raises
    InvalidRequest.
    """
    small, media = take_out(body)
    content = decode(small, kind)
    if media.pieces and sum(media.ticket in url for url in urls(content)) != len(media.pieces):
        # Something looks like media where none are read from.
        return DecodedBody(decode(body, kind), body, InlineMedia())
    return DecodedBody(content, small, media)


def take_out(body: bytes) -> tuple[bytes, InlineMedia]:
    """The body with tickets for its large data URLs, and what was taken out. JSON with escapes in
    its URLs stays as it is.
    """
    media = InlineMedia(random_hex(16) + ":")
    kept, at = [], 0
    for begin, end in _large_data(body) if len(body) > _LARGE else ():
        if body.find(b"\\", begin, end) >= 0:
            continue
        kept += [body[at:begin], f"{media.ticket}{len(media.pieces)}".encode()]
        media.pieces.append(body[begin:end])
        at = end
    return b"".join([*kept, body[at:]]) if kept else body, media


def _large_data(body: bytes) -> Iterator[tuple[int, int]]:
    """Yields where the data of large data URLs begin and end. Searches from quote to quote: a search
    for more than one byte would take longer than decoding the JSON.
    """
    quote = body.find(b'"')
    for _ in range(_MOST_QUOTES):
        end = body.find(b'"', quote + 1)
        if end < 0:
            return
        if end - quote > _LARGE and body.startswith(_OPENING, quote):
            comma = body.find(b",", quote, quote + _LONGEST_HEAD)
            if comma >= 0 and _FIELD.search(body, max(0, quote - _LONGEST_FIELD), quote):
                yield comma + 1, end
        quote = end


async def decode_media(request: PrepareRequest, inline: InlineMedia | None = None) -> None:
    """Turns the data URLs of a prompt into bytes. Raises InvalidRequest naming the field."""
    found = [
        (part, data)
        for message in request.conversation.messages
        for part in message.content
        if (data := _data_of(part, inline)) is not None
    ]
    if sum(len(data) for _, data in found) <= _INLINE:
        _decode_parts(found)
    else:
        await asyncio.to_thread(_decode_parts, found)


def _data_of(part: Part, inline: InlineMedia | None) -> str | bytes | None:
    kind = part.WhichOneof("part")
    url = "" if kind == "text" else (part.image.url if kind == "image" else part.video.file.url)
    if not is_data_url(url):
        return None
    data = url.partition(",")[2]
    return (inline.find(data) if inline else None) or data


def _decode_parts(media: list[tuple[Part, str | bytes]]) -> None:
    for part, data in media:
        _decode_part(part, data)


def _decode_part(part: Part, data: str | bytes) -> None:
    if part.WhichOneof("part") == "image":
        _decode_file(part.image, data)
        return
    video: Video = part.video
    kind, _ = data_url_head(video.file.url)
    if kind not in FRAME_KINDS:
        _decode_file(video.file, data)
        return
    raw = data.encode() if isinstance(data, str) else data
    if raw.count(b",") >= MOST_FRAMES:
        raise InvalidRequest(
            "INVALID_MEDIA",
            f"{video.field} must not hold more than {MOST_FRAMES} frames",
            field=video.field,
        )
    frames = [_decoded(frame, True, video.field) for frame in raw.split(b",")]
    video.CopyFrom(read_video_frames(frames, video.field, video.seconds_per_frame))


def _decode_file(file: Media, data: str | bytes) -> None:
    _, parameters = data_url_head(file.url)
    file.data = _decoded(data, "base64" in parameters, file.field)


def _decoded(data: str | bytes, is_base64: bool, name: str) -> bytes:
    try:
        content = _base64_bytes(data) if is_base64 else unquote_to_bytes(data)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            "INVALID_MEDIA", f"{name} is not valid base64: {error}", field=name
        ) from None
    if not content:
        raise InvalidRequest("INVALID_MEDIA", f"{name} is a data URL without data", field=name)
    return content


def _base64_bytes(data: str | bytes) -> bytes:
    try:
        raw = data.encode("ascii") if isinstance(data, str) else data
        return _in_slices(raw)
    except ValueError:  # binascii.Error among them
        # Line breaks and escaped characters are allowed in a URL; they are rare, so they are looked
        # for second.
        cleaned = b"".join(unquote_to_bytes(data).split())
        return base64.b64decode(cleaned, validate=True)


def _in_slices(data: bytes) -> bytes:
    """Decodes in slices, between which other threads can run."""
    pieces = []
    for start in range(0, len(data), _SLICE):
        some = data[start : start + _SLICE]
        if some.endswith(b"=") and start + _SLICE < len(data):
            raise ValueError("padding in the middle")
        pieces.append(base64.b64decode(some, validate=True))
    return b"".join(pieces)
