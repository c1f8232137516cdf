"""Media inside a request's body, which may be most of it: taken out before the JSON is read, and
decoded in a thread and in slices after the request has been admitted to the queue's limits.

On the event loop, a body with a picture of 7.5 MB would delay every other request by a tenth of a
second: 9 ms for the JSON, 40 for base64, and as many for copies of the result. A body is held once:
what is taken out of it are views.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import msgspec

from services.gateway.decoding.decode import decode, in_thread
from services.gateway.decoding.list_limits import MOST_FRAMES
from services.gateway.reading.media.media import FRAME_KINDS, SENT_FILE, read_video_frames
from shared.environment import random_hex
from shared.errors import InvalidRequest
from shared.prompts.data_url import (
    BadDataUrl,
    data_url_head,
    decode_data,
    is_base64,
    is_data_url,
)
from tessera.preprocess.v1.preprocess_pb2 import Media, Part, PrepareRequest, Video

_LARGE = 4096
_OPENING = b'"data:'
_FIELD = re.compile(
    rb'"(?:url|image_url|video_url|image|video|file_data|file_url)"\s*:\s*(?:\[\s*)?\Z'
)
_LONGEST_FIELD = 64
_LONGEST_HEAD = 256
# A body with more is mostly text.
_MOST_QUOTES = 20_000


_B = TypeVar("_B", bound=msgspec.Struct, covariant=True)


@dataclass(slots=True)
class InlineMedia:
    """The data of data URLs that were taken out of a body. In their places stand tickets."""

    ticket: str = ""
    pieces: list[memoryview] = field(default_factory=list)

    def find(self, data: str) -> memoryview | None:
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
    view = memoryview(body)
    kept: list[bytes | memoryview] = []
    at = 0
    for begin, end in _large_data(body) if len(body) > _LARGE else ():
        if body.find(b"\\", begin, end) >= 0:
            continue
        kept += [view[at:begin], f"{media.ticket}{len(media.pieces)}".encode()]
        media.pieces.append(view[begin:end])
        at = end
    return b"".join([*kept, view[at:]]) if kept else body, media


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


async def serialized(
    request: PrepareRequest,
    inline: InlineMedia | None = None,
    files: Mapping[str, bytes] | None = None,
) -> bytes:
    """A prompt as it is sent, with bytes in the places of its data URLs and of `files`, which were sent before;
    `inline` is then empty. Raises InvalidRequest naming the field.
    """
    source = _Sources(inline or InlineMedia(), files or {})

    def work() -> bytes:
        full = PrepareRequest()
        full.CopyFrom(
            request
        )  # what is replaced in a message keeps its memory as long as that lives
        for message in full.conversation.messages:
            for part in message.content:
                _decode_part(part, source)
        return full.SerializeToString()

    try:
        return await in_thread(work)
    finally:
        if inline is not None:
            inline.pieces.clear()


class _Sources(NamedTuple):
    """Where bytes are found."""

    inline: InlineMedia
    files: Mapping[str, bytes]


def _decode_part(part: Part, source: _Sources) -> None:
    kind = part.WhichOneof("part")
    if kind == "media":
        _decode_file(part.media, source)
    elif kind == "video" and is_data_url(part.video.file.url):
        _decode_video(part.video, source)


def _decode_video(video: Video, source: _Sources) -> None:
    kind, _ = data_url_head(video.file.url)
    if kind not in FRAME_KINDS:
        _decode_file(video.file, source)
        return
    data = _data_of(video.file.url, source.inline)
    raw = data.encode() if isinstance(data, str) else bytes(data)
    if raw.count(b",") >= MOST_FRAMES:
        raise InvalidRequest(
            "INVALID_MEDIA",
            f"{video.field} must not hold more than {MOST_FRAMES} frames",
            field=video.field,
        )
    frames = [_decoded(frame, True, video.field) for frame in raw.split(b",")]
    video.CopyFrom(read_video_frames(frames, video.field, video.seconds_per_frame))


def _decode_file(file: Media, source: _Sources) -> None:
    url = file.url
    if is_data_url(url):
        _, parameters = data_url_head(url)
        file.data = _decoded(_data_of(url, source.inline), is_base64(parameters), file.field)
    elif url.startswith(SENT_FILE):
        file.data = source.files[url.removeprefix(SENT_FILE)]


def _data_of(url: str, inline: InlineMedia) -> str | memoryview:
    data = url.partition(",")[2]
    found = inline.find(data)
    return data if found is None else found


def _decoded(data: str | bytes | memoryview, in_base64: bool, name: str) -> bytes:
    try:
        return decode_data(data, in_base64)
    except BadDataUrl as error:
        raise InvalidRequest("INVALID_MEDIA", f"{name} {error}", field=name) from None
