"""The parts of a message: text, images, videos."""

from services.gateway.reading.fields import Fields
from services.gateway.reading.list_limits import MOST_FRAMES
from services.gateway.reading.media import (
    read_image_bytes,
    read_image_url,
    read_video_bytes,
    read_video_frames,
    read_video_url,
)
from tessera.gateway.v1.chat_pb2 import VideoFrames
from tessera.preprocess.v1.preprocess_pb2 import Media, Part, Video

_DETAILS = ("", "auto", "low", "high")
_LONGEST_FRAME_S = 3600.0


def read_part(fields: Fields) -> Part:
    """One part of a message's `content`. Raises InvalidRequest naming the field."""
    match fields.raw("type"):
        case "text":
            if "text" not in fields:
                raise fields.wrong("text", "is missing")
            return Part(text=fields.string("text"))
        case "image_url":
            return Part(image=_image(fields))
        case "video_url":
            return Part(video=_video(fields))
        case other:
            raise fields.wrong(
                "type", f"must be text, image_url or video_url, not {str(other)[:32]!r}"
            )


def _image(fields: Fields) -> Media:
    path, value = fields.path("image_url"), fields.raw("image_url")
    if isinstance(value, bytes):  # never from JSON: the gRPC door has the file itself
        return read_image_bytes(value, path)
    return read_image_url(_image_url(fields), path)


def _image_url(fields: Fields) -> str:
    if isinstance(fields.raw("image_url"), str):
        return fields.string("image_url")
    image = _object(fields, "image_url")
    if image.string("detail") not in _DETAILS:
        raise image.wrong("detail", "must be auto, low or high")
    return image.string("url")


def _video(fields: Fields) -> Video:
    path, value = fields.path("video_url"), fields.raw("video_url")
    if isinstance(value, bytes):  # from the gRPC door, as above
        return read_video_bytes(value, path)
    if isinstance(value, VideoFrames):
        if len(value.frames) > MOST_FRAMES:
            raise fields.wrong("video_url", f"must not hold more than {MOST_FRAMES} frames")
        return read_video_frames(value.frames, path, value.seconds_per_frame)
    if isinstance(value, str):
        return read_video_url(fields.string("video_url"), path)
    video = _object(fields, "video_url")
    pace = video.number("seconds_per_frame", 0.0, 0.0, _LONGEST_FRAME_S)
    return read_video_url(video.string("url"), path, pace)


def _object(fields: Fields, name: str) -> Fields:
    """A media part's own fields, of which `url` must be there."""
    if name not in fields:
        raise fields.wrong(name, "is missing")
    inner = fields.mapping(name)
    if "url" not in inner:
        raise inner.wrong("url", "is missing")
    return inner
