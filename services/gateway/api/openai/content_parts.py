"""The parts of a message's content."""

from services.gateway.api.openai.schema import ContentPart, MediaUrl, SentFile
from services.gateway.decoding.bounds import number, wrong
from services.gateway.reading.media.media import (
    check_item_name,
    named_image,
    named_video,
    path_url,
    read_image_url,
    read_sent_file,
    read_video_url,
)
from tessera.preprocess.v1.preprocess_pb2 import Media, Part, Video

_DETAILS = (None, "", "auto", "low", "high")
_LONGEST_FRAME_S = 3600.0
_TAKEN = ("text", "image_url", "video_url", "image", "video", "file")
_NOT_TAKEN = ("audio",)
# What other APIs send, and what to send here.
_AS_TEXT = 'send it as {"type": "text", "text": ...}'
_AS_IMAGE = (
    'send it as {"type": "image_url", "image_url": {"url": ...}}, with a data: or http(s) URL'
)
_AS_VIDEO = (
    'send it as {"type": "video_url", "video_url": {"url": ...}}, with a data: or http(s) URL'
)
_NO_AUDIO = "this server takes no sound"
_AS_FILE = 'send an image as {"type": "file", "file": {"file_id": ...}}'
_INSTEAD = {
    "input_image": _AS_IMAGE, "input_video": _AS_VIDEO,
    "audio": _NO_AUDIO, "audio_url": _NO_AUDIO, "input_audio": _NO_AUDIO, "input_file": _AS_FILE,
    "input_text": _AS_TEXT, "output_text": _AS_TEXT, "refusal": _AS_TEXT,
}  # fmt: skip


def read_part(part: ContentPart, path: str) -> Part:
    """One part, which stands at `path` of the request; an image or a video that is named alone has no source. Raises
    InvalidRequest naming the field.
    """
    if part.uuid is not None:
        is_text = part.text is not None if part.type is None else part.type == "text"
        check_item_name(part.uuid, f"{path}.uuid", is_text=is_text)
    kind = _kind_by_key(part, path) if part.type is None else part.type
    match kind:
        case "text":
            if part.text is None:
                raise wrong(f"{path}.text", "is missing")
            return Part(text=part.text)
        case "image_url":
            return Part(media=_image(part.image_url, f"{path}.image_url", part.uuid))
        case "video_url":
            return Part(video=_video(part.video_url, f"{path}.video_url", part.uuid))
        case "image":
            return Part(media=_image(_named(part.image), f"{path}.image", part.uuid))
        case "video":
            return Part(video=_video(_named(part.video), f"{path}.video", part.uuid))
        case "file":
            return Part(media=_file(part.file, f"{path}.file"))
        case _:
            raise wrong(
                f"{path}.type",
                f"must be one of {', '.join(_TAKEN)}, not {kind[:32]!r}{_hint(kind)}",
            )


def _kind_by_key(part: ContentPart, path: str) -> str:
    """What a part without `type` is, by its one key."""
    found = [key for key in _TAKEN if getattr(part, key) is not None]
    found += [key for key in _NOT_TAKEN if bytes(getattr(part, key)) not in (b"", b"null")]
    if len(found) != 1:
        has = f"it has {' and '.join(found)}" if found else "it has none of them"
        raise wrong(
            path,
            f"must have a type, or one of the keys {', '.join(_TAKEN)} by which it is known: {has}",
        )
    if found[0] in _NOT_TAKEN:
        raise wrong(f"{path}.{found[0]}", f"is not taken{_hint(found[0])}", "UNSUPPORTED_PARAMETER")
    return found[0]


def _hint(kind: str) -> str:
    return f": {_INSTEAD[kind]}" if kind in _INSTEAD else ""


def _named(value: str | None) -> str | None:
    """What MindIE's clients name by a path, as a URL."""
    return None if value is None else path_url(value)


def _image(value: str | MediaUrl | None, path: str, uuid: str | None) -> Media:
    if value is None and uuid is not None:
        return named_image(path)
    if isinstance(value, MediaUrl) and value.detail not in _DETAILS:
        raise wrong(f"{path}.detail", "must be auto, low or high")
    return read_image_url(_url(value, path), path)


def _file(value: SentFile | None, path: str) -> Media:
    if value is None:
        raise wrong(path, "is missing")
    if value.file_data is None:
        return read_sent_file(value.file_id, f"{path}.file_id")
    if value.file_id is not None:
        raise wrong(f"{path}.file_id", "cannot be combined with file_data: send one of them")
    return read_image_url(value.file_data, f"{path}.file_data")


def _video(value: str | MediaUrl | None, path: str, uuid: str | None) -> Video:
    if value is None and uuid is not None:
        return named_video(path)
    given = value.seconds_per_frame if isinstance(value, MediaUrl) else None
    pace = number(f"{path}.seconds_per_frame", given, 0.0, 0.0, _LONGEST_FRAME_S)
    return read_video_url(_url(value, path), path, pace)


def _url(value: str | MediaUrl | None, path: str) -> str:
    if value is None:
        raise wrong(path, "is missing")
    if isinstance(value, str):
        return value
    if value.url is None:
        raise wrong(f"{path}.url", "is missing")
    return value.url
