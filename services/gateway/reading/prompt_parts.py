"""Prompts that are a text, or texts with media between them, whichever API they came by."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from services.gateway.decoding.about import about
from services.gateway.decoding.bounds import at_most, wrong
from services.gateway.decoding.list_limits import MOST_PARTS
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.generation import Prompt, conversation_prompt, text_prompt
from services.gateway.reading.media.media import path_url, read_image_url, read_video_url
from tessera.preprocess.v1.preprocess_pb2 import Conversation, Media, Part, PrepareRequest, Video

_PICTURE = "an image, by a URL or the path of a file"
_VIDEO = "a video, by a URL or the path of a file"
_KEYS = ("text", "image", "image_url", "video", "video_url")
_KINDS = f"must be one of {', '.join(_KEYS)}"


class PartUrl(msgspec.Struct):
    """Where an image or a video is."""

    url: Annotated[str | None, about("a data:, http:, https: or file: URL")] = None


class PromptPart(msgspec.Struct):
    """One part of a prompt: the field that `type` names is read, without it the one that there is. An image or a video
    is a URL, or the absolute path of a file below --allowed-local-media-path.
    """

    type: Annotated[str | None, about("text, image, image_url, video or video_url")] = None
    text: Annotated[str | None, about("a text")] = None
    image: Annotated[str | None, about(_PICTURE)] = None
    image_url: Annotated[str | PartUrl | None, about(_PICTURE)] = None
    video: Annotated[str | None, about(_VIDEO)] = None
    video_url: Annotated[str | PartUrl | None, about(_VIDEO)] = None

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class MediaData(msgspec.Struct, forbid_unknown_fields=True):
    """The media of a prompt in order, images before videos: URLs, or absolute paths of files below
    --allowed-local-media-path. The prompt marks their places by the model's own placeholders; where it has none, they
    stand before it.
    """

    image: str | list[str] | None = None
    video: str | list[str] | None = None

    def listed(self) -> Iterator[tuple[str, str, str]]:
        """Kind, place and URL of each."""
        for kind, given in (("image", self.image), ("video", self.video)):
            if isinstance(given, str):
                yield kind, kind, given
            for index, url in enumerate(given if isinstance(given, list) else ()):
                yield kind, f"{kind}[{index}]", url


# What a field of a prompt may hold.
PromptText = str | list[PromptPart]


def read_prompt(value: PromptText | None, field: str, model: ServedModel) -> Prompt:
    """The prompt in the field `field`. Raises InvalidRequest naming the field, or the part of it."""
    if value is None:
        raise wrong(field, "is missing: send a text, or a list of parts")
    if isinstance(value, str):
        return text_prompt(value)
    if not value:
        raise wrong(field, "must be a text, or a list of at least one part")
    at_most(field, len(value), MOST_PARTS, "parts")
    parts = [_read_part(part, f"{field}[{index}]") for index, part in enumerate(value)]
    return parts_prompt(parts, model)


def marked_prompt(text: str, data: MediaData, field: str, model: ServedModel) -> Prompt:
    """A text that marks the places of the media in the field `field`. Raises InvalidRequest naming that, or a part of
    it.
    """
    found = list(data.listed())
    at_most(field, len(found), MOST_PARTS, "media")
    if not found:
        return text_prompt(text)
    parts: list[Part] = []
    for kind, place, url in found:
        path = f"{field}.{place}"
        if kind == "image":
            parts.append(image_part(url, path))
        else:
            parts.append(Part(video=read_video_url(path_url(url), path)))
    prompt = parts_prompt([*parts, Part(text=text)], model)
    prompt.prepare.conversation.marks_media = True
    return prompt


def parts_prompt(parts: Sequence[Part], model: ServedModel) -> Prompt:
    """A prompt of texts and media, in their order. Its text, where it is repeated, is that of its texts."""
    kinds = {part.WhichOneof("part") for part in parts}
    if kinds <= {"text"}:
        return text_prompt("".join(part.text for part in parts))
    prepare = PrepareRequest(conversation=Conversation(as_prompt=True))
    prepare.conversation.messages.add(role="user", content=parts)
    whole = conversation_prompt(prepare, model)
    return Prompt(prepare, whole.bound, lambda: "".join(part.text for part in parts))


def media_urls(value: PromptText | None) -> Iterator[str]:
    """The URLs that media of a prompt are read from."""
    for part in value if isinstance(value, list) else ():
        for found in (part.image, part.image_url, part.video, part.video_url):
            url = found.url if isinstance(found, PartUrl) else found
            if url is not None:
                yield url


def image_part(url: str, field: str) -> Part:
    """A part that is an image, by its URL or path. Raises InvalidRequest naming `field`."""
    media: Media = read_image_url(path_url(url), field)
    return Part(media=media)


def _read_part(part: PromptPart, path: str) -> Part:
    kind = _kind(part, path)
    value = getattr(part, kind)
    if isinstance(value, PartUrl):
        value, path = value.url, f"{path}.{kind}.url"
    else:
        path = f"{path}.{kind}"
    if value is None:
        raise wrong(path, "is missing")
    if kind == "text":
        return Part(text=value)
    if kind.startswith("image"):
        return image_part(value, path)
    video: Video = read_video_url(path_url(value), path)
    return Part(video=video)


def _kind(part: PromptPart, path: str) -> str:
    """The field that a part is read from."""
    if part.type is not None:
        if part.type not in _KEYS:
            raise wrong(f"{path}.type", f"{_KINDS}, not {part.type[:32]!r}")
        return part.type
    found = [key for key in _KEYS if getattr(part, key) is not None]
    if len(found) != 1:
        has = f"it has {' and '.join(found)}" if found else "it has none of them"
        raise wrong(path, f"must have one of the keys {', '.join(_KEYS)}: {has}")
    return found[0]
