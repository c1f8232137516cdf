"""Media as clients send them. URLs stay as they are: data URLs become bytes later (`data_urls.py`),
http(s) and file URLs are passed on unread: preprocess says which it takes. Files that were sent before become bytes
later too (`admission/sent_files.py`).
"""

from collections.abc import Sequence
from urllib.parse import quote, urlsplit

from services.gateway.decoding.bounds import text, wrong
from services.gateway.decoding.list_limits import LONGEST_UUID
from shared.errors import InvalidRequest
from shared.prompts.data_url import (
    BadDataUrl,
    base64_bytes,
    data_url_head,
    is_base64,
    is_data_url,
)
from tessera.common.v1.media_pb2 import Modality
from tessera.preprocess.v1.preprocess_pb2 import Media, Video

# Before the id of a file that was sent. No URL of a client's begins so.
SENT_FILE = "sent-file:"
_LONGEST_URL = 8192
_LONGEST_FILE_ID = 256
_LONGEST_HOST = 253  # RFC 1035
_ANY = "application/octet-stream"
# vLLM's `data:video/jpeg;base64,<frame>,<frame>,...`: a video as its frames.
FRAME_KINDS = ("video/jpeg", "video/png")


def read_image_url(url: str, field: str) -> Media:
    """An image from an `image_url`. Raises InvalidRequest naming `field`."""
    if not is_data_url(url):
        return _remote(url, field, Modality.MODALITY_IMAGE)
    kind, _ = _head(url, field)
    if kind and not kind.startswith("image/") and kind != _ANY:
        raise _wrong(field, f"holds {kind[:64]!r}, not an image")
    return Media(url=url, field=field, modality=Modality.MODALITY_IMAGE)


def read_video_url(url: str, field: str, seconds_per_frame: float = 0.0) -> Video:
    """A video from a `video_url`: its file, or its frames. Raises InvalidRequest naming `field`."""
    frames = False
    if is_data_url(url):
        kind, parameters = _head(url, field)
        frames = kind in FRAME_KINDS
        if frames and not is_base64(parameters):
            raise _wrong(field, f"must hold the frames of {kind} in base64")
        if kind and not kind.startswith(("video/", "image/")) and kind != _ANY:
            raise _wrong(field, f"holds {kind[:64]!r}, not a video")
        file = Media(url=url, field=field)
    else:
        file = _remote(url, field)
    if seconds_per_frame and not frames:
        raise _wrong(field, "is a file with a pace of its own: leave seconds_per_frame out")
    return Video(
        file=file,
        field=field,
        seconds_per_frame=seconds_per_frame,
        modality=Modality.MODALITY_VIDEO,
    )


def read_video_frames(frames: Sequence[bytes], field: str, seconds_per_frame: float = 0.0) -> Video:
    """A video that came as the files of its frames."""
    return Video(
        frames=[_file(frame, field) for frame in frames],
        seconds_per_frame=seconds_per_frame,
        field=field,
        modality=Modality.MODALITY_VIDEO,
    )


def read_video_bytes(content: bytes, field: str) -> Video:
    """A video that came as the bytes of its file."""
    return Video(file=_file(content, field), field=field, modality=Modality.MODALITY_VIDEO)


def read_image_bytes(content: bytes, field: str) -> Media:
    """An image that came as bytes."""
    return _file(content, field, Modality.MODALITY_IMAGE)


def read_image_base64(data: str, field: str) -> Media:
    """An image that came as the base64 of its file. Raises InvalidRequest naming `field`."""
    try:
        content = base64_bytes(data.encode())
    except ValueError as error:  # binascii.Error among them
        raise _wrong(field, f"is not valid base64: {error}") from None
    return read_image_bytes(content, field)


def read_sent_file(file_id: str | None, field: str) -> Media:
    """An image that was sent to /v1/files. Raises InvalidRequest naming `field`."""
    if not file_id:
        raise wrong(field, "is missing")
    name = text(field, file_id, _LONGEST_FILE_ID)
    return Media(url=SENT_FILE + name, field=field, modality=Modality.MODALITY_IMAGE)


def check_item_name(name: str, field: str, *, is_text: bool) -> None:
    """Raises InvalidRequest for a name that no item may have; `is_text`: of a part that is none."""
    if not text(field, name, LONGEST_UUID):
        raise wrong(field, "must not be empty: leave it out for an item without a name")
    if is_text:
        raise wrong(field, "is for images and videos: leave it out of a text")


def named_image(field: str) -> Media:
    """An image without a source: the one that was last sent under its name."""
    return Media(field=field, modality=Modality.MODALITY_IMAGE)


def named_video(field: str) -> Video:
    """A video without a source, likewise."""
    return Video(field=field, modality=Modality.MODALITY_VIDEO)


def path_url(path: str) -> str:
    """The URL of what may be named by a path: that of a file where it is an absolute path, else as it is."""
    return f"file://{quote(path)}" if path.startswith("/") else path


def _head(url: str, field: str) -> tuple[str, list[str]]:
    try:
        return data_url_head(url)
    except BadDataUrl as error:
        raise _wrong(field, str(error)) from None


def _file(
    content: bytes, field: str, modality: Modality.ValueType = Modality.MODALITY_UNSPECIFIED
) -> Media:
    if not content:
        raise _wrong(field, "is empty")
    return Media(data=content, field=field, modality=modality)


def _remote(
    url: str, field: str, modality: Modality.ValueType = Modality.MODALITY_UNSPECIFIED
) -> Media:
    if not url[:8].lower().startswith(("http://", "https://", "file:/")):
        raise _wrong(field, "must be a data:, http:, https: or file: URL")
    if len(url) > _LONGEST_URL:
        raise _wrong(field, f"is longer than {_LONGEST_URL} characters")
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        raise _wrong(field, "is no URL") from None
    if len(host) > _LONGEST_HOST:
        raise _wrong(field, f"names a host of more than {_LONGEST_HOST} characters")
    return Media(url=url, field=field, modality=modality)


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest("INVALID_MEDIA", f"{field} {message}", field=field)
