"""MP4, WebM, Matroska, QuickTime and AVI by PyAV, which is optional (the extra `video` of pyproject.toml)."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import av
import av.error
import PIL.Image

from services.preprocess.media.image_limits import ImageLimits, UnreadableImage

# Files that a file refers to are never opened.
_OPTIONS = {"protocol_whitelist": "none", "enable_drefs": "0"}
_ROTATE = {
    90: PIL.Image.Transpose.ROTATE_90,
    180: PIL.Image.Transpose.ROTATE_180,
    270: PIL.Image.Transpose.ROTATE_270,
}


def _conversion() -> dict[str, int]:
    """Newer versions of PyAV start threads to convert a frame, which an image worker may not."""
    try:
        av.VideoFrame(16, 16, "yuv420p").to_image(threads=1)
    except TypeError:
        return {}
    return {"threads": 1}


_CONVERTED = _conversion()


class Reader:
    """The first video stream of a file. `total` is its number of frames, `seconds` how long they last."""

    def __init__(self, data: bytes, demuxer: str, limits: ImageLimits) -> None:
        """`demuxer` is FFmpeg's name of the format. Raises UnreadableImage."""
        self._data = data
        self._demuxer = demuxer
        self._limits = limits
        self.size = (0, 0)
        self.seconds: float | None = None
        with self._open() as container:
            self.total = self._measure(container)

    def frames(self, chosen: Sequence[int]) -> Iterator[PIL.Image.Image]:
        """The frames with these indices, ascending, as upright RGB pictures. Raises UnreadableImage."""
        wanted = iter(chosen)
        next_wanted = next(wanted, None)
        try:
            with self._open() as container:
                for index, frame in enumerate(container.decode(video=0)):
                    if index == next_wanted:
                        self._limits.check(frame.width, frame.height)
                        yield _upright(frame)
                        next_wanted = next(wanted, None)
                    if next_wanted is None:
                        return
        except av.error.FFmpegError as error:
            raise _damaged(error) from error
        raise UnreadableImage("VIDEO_DAMAGED", "the video file has fewer frames than it says")

    def _open(self) -> Any:
        try:
            container = av.open(io.BytesIO(self._data), "r", format=self._demuxer, options=_OPTIONS)
        except av.error.FFmpegError as error:
            raise _damaged(error) from error
        for stream in container.streams.video:
            # One file at a time on one core, as with images.
            stream.codec_context.thread_count = 1
        return container

    def _measure(self, container: Any) -> int:
        """Counts frames by their packets, undecoded: what a header says of them may be wrong or missing."""
        if not container.streams.video:
            raise UnreadableImage("VIDEO_FORMAT", "the file has no video stream")
        stream = container.streams.video[0]
        self.size = (stream.codec_context.width, stream.codec_context.height)
        self._limits.check(*self.size)
        try:
            total = sum(1 for packet in container.demux(stream) if packet.size)
        except av.error.FFmpegError as error:
            raise _damaged(error) from error
        if not total:
            raise UnreadableImage("VIDEO_DAMAGED", "the video file has no frames")
        rate = stream.average_rate or stream.guessed_rate
        self.seconds = float(total / rate) if rate else None
        return total


def _upright(frame: Any) -> PIL.Image.Image:
    picture: PIL.Image.Image = frame.to_image(**_CONVERTED)
    turn = _ROTATE.get(round(frame.rotation) % 360)
    return picture if turn is None else picture.transpose(turn)


def _damaged(error: Exception) -> UnreadableImage:
    return UnreadableImage("VIDEO_DAMAGED", f"the video file is damaged: {error}")
