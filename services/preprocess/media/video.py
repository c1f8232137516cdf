"""Video files: the selected frames of an animation, or of a container that PyAV reads. Runs in the image worker."""

import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import PIL.Image

from services.preprocess.media.frame_selection import FrameSelection
from services.preprocess.media.image_decoder import bytes_per_pixel, rgb
from services.preprocess.media.image_header import check_animation
from services.preprocess.media.image_limits import ImageLimits, NeedsMoreMemory, UnreadableImage

_ANIMATIONS = ("GIF", "WEBP", "PNG")
# FFmpeg's demuxers by the magic bytes of their files, and where those are. One is always named: some that FFmpeg
# could guess (playlists) would open other files and addresses.
_CONTAINERS = {"mov": (4, b"ftyp"), "matroska": (0, b"\x1a\x45\xdf\xa3"), "avi": (8, b"AVI ")}
_ACCEPTED = (
    "send an animated GIF, WebP or PNG, or the video's frames as"
    " data:video/jpeg;base64,<frame>,<frame>,..."
)


@dataclass(frozen=True)
class OpenVideo:
    """A video that is being read. `frames` are upright RGB pictures, decoded one at a time."""

    frames: Iterator[PIL.Image.Image]
    count: int
    seconds_per_frame: float  # 0 where the file does not give it


def open_video(data: bytes, selection: FrameSelection, limits: ImageLimits) -> OpenVideo:
    """The chosen frames of a video file. Raises UnreadableImage; so does taking a frame."""
    for demuxer, (place, magic) in _CONTAINERS.items():
        if data[place : place + len(magic)] == magic:
            return _container(data, demuxer, selection, limits)
    try:
        check_animation(data, limits)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = PIL.Image.open(io.BytesIO(data), formats=_ANIMATIONS)
            limits.check(*image.size)
            limits.check_memory(*image.size, bytes_per_pixel(image.format))
            durations_ms = _durations_ms(image)
    except UnreadableImage:
        raise
    except MemoryError as error:
        raise NeedsMoreMemory("video", limits.memory_bytes) from error
    except PIL.UnidentifiedImageError as error:
        raise UnreadableImage(
            "VIDEO_FORMAT", f"this is not a video file that is read here: {_ACCEPTED}"
        ) from error
    except Exception as error:  # Pillow's decoders raise anything on damaged files
        raise UnreadableImage("VIDEO_DAMAGED", f"the video file is damaged: {error}") from error
    seconds = sum(durations_ms) / 1000
    chosen = selection.choose(len(durations_ms), seconds or None)
    limits.check_frames(len(chosen), *image.size)
    first = _first(image)
    frames = _frames(image, [first + index for index in chosen])
    return OpenVideo(frames, len(chosen), seconds / len(chosen))


def _first(image: PIL.Image.Image) -> int:
    # A PNG may begin with a default picture for readers that do not support animation.
    return int(bool(getattr(image, "default_image", False)))


def _durations_ms(image: PIL.Image.Image) -> list[float]:
    found = []
    for index in range(_first(image), getattr(image, "n_frames", 1)):
        image.seek(index)
        image.load()
        found.append(max(0.0, float(image.info.get("duration") or 0)))
    return found


def _frames(image: PIL.Image.Image, places: Sequence[int]) -> Iterator[PIL.Image.Image]:
    for place in places:
        try:
            image.seek(place)
            image.load()
            picture = image.copy()
        except MemoryError:
            raise
        except Exception as error:
            raise UnreadableImage("VIDEO_DAMAGED", f"frame {place} is damaged: {error}") from error
        yield rgb(picture)


def _container(
    data: bytes, demuxer: str, selection: FrameSelection, limits: ImageLimits
) -> OpenVideo:
    try:
        # PyAV is optional and slow to import: loaded with the first file that needs it.
        from services.preprocess.media import video_container
    except ImportError as error:
        raise UnreadableImage(
            "VIDEO_FORMAT",
            f"this server does not read MP4, WebM and the like (it lacks PyAV): {_ACCEPTED}",
        ) from error
    reader = video_container.Reader(data, demuxer, limits)
    chosen = selection.choose(reader.total, reader.seconds)
    limits.check_frames(len(chosen), *reader.size)
    return OpenVideo(reader.frames(chosen), len(chosen), (reader.seconds or 0.0) / len(chosen))
