"""Media as clients send them: data URLs become bytes here, http(s) URLs are passed on unfetched."""

import base64
import binascii
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import Media, Video

_LONGEST_URL = 8192
_ANY = "application/octet-stream"
_FRAMES = ("video/jpeg", "video/png")


def read_image_url(url: str, field: str) -> Media:
    """An image from an `image_url`. Raises InvalidRequest naming `field`."""
    if not url[:8].lower().startswith("data:"):
        return _remote(url, field)
    kind, parameters, body = _data_url(url, field)
    if kind and not kind.startswith("image/") and kind != _ANY:
        raise _wrong(field, f"holds {kind[:64]!r}, not an image")
    return Media(data=_decoded(body, "base64" in parameters, field), field=field)


def read_video_url(url: str, field: str, seconds_per_frame: float = 0.0) -> Video:
    """A video from a `video_url`: its file, or vLLM's `data:video/jpeg;base64,<frame>,<frame>,...`.

    Raises InvalidRequest naming `field`.
    """
    if url[:8].lower().startswith("data:"):
        kind, parameters, body = _data_url(url, field)
        if kind in _FRAMES:
            if "base64" not in parameters:
                raise _wrong(field, f"must hold the frames of {kind} in base64")
            return read_video_frames(
                [_decoded(frame, True, field) for frame in body.split(",")],
                field,
                seconds_per_frame,
            )
        if kind and not kind.startswith(("video/", "image/")) and kind != _ANY:
            raise _wrong(field, f"holds {kind[:64]!r}, not a video")
        file = Media(data=_decoded(body, "base64" in parameters, field), field=field)
    else:
        file = _remote(url, field)
    if seconds_per_frame:
        raise _wrong(field, "is a file with a pace of its own: leave seconds_per_frame out")
    return Video(file=file, field=field)


def read_video_frames(frames: Sequence[bytes], field: str, seconds_per_frame: float = 0.0) -> Video:
    """A video that came as the files of its frames."""
    return Video(
        frames=[read_image_bytes(frame, field) for frame in frames],
        seconds_per_frame=seconds_per_frame,
        field=field,
    )


def read_video_bytes(content: bytes, field: str) -> Video:
    """A video that came as the bytes of its file."""
    return Video(file=read_image_bytes(content, field), field=field)


def read_image_bytes(content: bytes, field: str) -> Media:
    """An image that came as bytes."""
    if not content:
        raise _wrong(field, "is empty")
    return Media(data=content, field=field)


def _remote(url: str, field: str) -> Media:
    if not url[:8].lower().startswith(("http://", "https://")):
        raise _wrong(field, "must be a data:, http: or https: URL")
    if len(url) > _LONGEST_URL:
        raise _wrong(field, f"is longer than {_LONGEST_URL} characters")
    return Media(url=url, field=field)


def _data_url(url: str, field: str) -> tuple[str, list[str], str]:
    """Its media type, its parameters and its data."""
    # RFC 2397: data:[<mediatype>][;base64],<data>
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise _wrong(field, "is a data URL without a comma before its data")
    kind, *parameters = head.lower().split(";")
    return kind, [parameter.strip() for parameter in parameters], body


def _decoded(body: str, is_base64: bool, field: str) -> bytes:
    try:
        content = _base64_bytes(body) if is_base64 else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise _wrong(field, f"is not valid base64: {error}") from None
    if not content:
        raise _wrong(field, "is a data URL without data")
    return content


def _base64_bytes(body: str) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error:
        # Line breaks and escaped characters are allowed in a URL; they are rare, so they are looked
        # for second.
        cleaned = b"".join(unquote_to_bytes(body).split())
        return base64.b64decode(cleaned, validate=True)


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest("INVALID_MEDIA", f"{field} {message}", field=field)
