"""The process that decodes images and makes their pixel values: one job at a time over its pipes.

Messages both ways: 4 bytes of length, a JSON object, and as many raw bytes as its field `bytes` gives. With each job
an open file descriptor of the artifact arrives on a socket, and the worker writes the pixel values there. It opens no
file itself (`confinement`). It ends when its input ends.

`python -m services.preprocess.worker.image_worker <processor class> <its settings as JSON> <limits as JSON>
<sizes of a video's frames as JSON> <number of the socket>`
"""

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

# transformers' image processors are numpy and Pillow; torch would cost two seconds and 200 MB for nothing.
sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np  # noqa: E402
import PIL.Image  # noqa: E402

from services.preprocess.media import early_resize, frames  # noqa: E402
from services.preprocess.media.image_decoder import decode  # noqa: E402
from services.preprocess.media.image_limits import (  # noqa: E402
    ImageLimits,
    NeedsMoreMemory,
    UnreadableImage,
)
from services.preprocess.media.video import OpenVideo, open_video  # noqa: E402
from services.preprocess.worker.confinement import confine  # noqa: E402
from services.preprocess.worker.warm_up import warm_up  # noqa: E402
from shared.artifacts import file as artifact_file  # noqa: E402
from shared.artifacts.pixel_scaling import PixelScaling  # noqa: E402

_LENGTH = struct.Struct("<I")
_CHANNELS = 3
_BUFFER_BYTES = 256 << 20  # besides pixels: the file itself, and the decoder's buffers
_Pixels = np.ndarray[Any, np.dtype[np.generic]]


class PixelMaker:
    """The checkpoint's own image processor, from transformers, in its Pillow form."""

    def __init__(
        self, name: str, config: dict[str, Any], video_size: dict[str, Any] | None
    ) -> None:
        import transformers

        found = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
        if found is None:
            raise SystemExit(f"transformers has no image processor {name}")
        self._processor = found.from_dict(config)
        self.settings: dict[str, Any] = {
            key: value for key, value in self._processor.to_dict().items() if value is not None
        }
        # Without a video processor in the folder, videos are resized as images are.
        if "temporal_patch_size" in self.settings:
            self.settings["video_size"] = video_size or self.settings["size"]
        self.scaling = self._find_scaling()

    def make(self, image: PIL.Image.Image) -> _Pixels:
        """Pixel values [channels, height, width], or what else the family's processor makes of a picture.

        uint8 where there is a `scaling` that makes the processor's float32 of them, a patch's
        moments then being one; else those float32.
        """
        small = early_resize.resize(self._processor, image)
        return self._bytes(small) if self.scaling is not None else self._values(small)

    def video_bytes(self, limits: ImageLimits) -> int:
        """The largest size of a video's pixel values, in bytes."""
        if "temporal_patch_size" not in self.settings:
            return 0
        side, time = int(self.settings["patch_size"]), int(self.settings["temporal_patch_size"])
        row = int(self.settings["merge_size"]) ** 2 * side**2 * time * _CHANNELS
        return limits.max_rows * row * (1 if self.scaling is not None else 4)

    def _bytes(self, image: PIL.Image.Image, **changes: Any) -> _Pixels:
        if "temporal_patch_size" in self.settings:
            changes["temporal_patch_size"] = 1
        return self._values(image, do_rescale=False, do_normalize=False, **changes).astype(np.uint8)

    def _values(self, image: PIL.Image.Image, **changes: Any) -> _Pixels:
        made = self._processor(images=image, return_tensors="np", **changes)
        values = made["pixel_values"]
        # Where pictures have grids of their own, the processor gives rows of patches one picture
        # after the other; elsewhere it gives one array for each picture.
        values = values if "image_grid_thw" in made else values[0]
        whole = "do_rescale" in changes  # else what numpy made of them may be wider than float32
        return np.ascontiguousarray(values, None if whole else np.float32)

    def _find_scaling(self) -> PixelScaling | None:
        """The scaling from bytes to the processor's values, if it reproduces them bit for bit."""
        every = np.random.default_rng(0).permutation(np.arange(64 * 48 * _CHANNELS) % 256)
        picture = PIL.Image.fromarray(every.reshape(48, 64, _CHANNELS).astype(np.uint8))
        try:
            scaling = PixelScaling.of(self.settings, _CHANNELS)
            values, raw = self._values(picture), self._bytes(picture)
        except (KeyError, TypeError, ValueError):
            return None
        if raw.ndim not in (2, 3, 4) or values.size % raw.size:
            return None
        count = 1 if raw.ndim == 3 else len(raw)  # one square, several, or patches
        apart = raw.reshape(count, _CHANNELS, 1, -1)
        found = np.stack([scaling.table()[c][apart[:, c]] for c in range(_CHANNELS)], axis=1)
        wanted = values.reshape(count, _CHANNELS, values.size // raw.size, -1)
        return scaling if (found == wanted).all() else None

    def make_video(
        self, pictures: Iterable[PIL.Image.Image], count: int, limits: ImageLimits
    ) -> tuple[_Pixels, tuple[int, int]]:
        """uint8 or float32 [patches, channels * time * side * side] of `count` frames of one size,
        and that size: width and height.

        For processors that repeat an image to fill a patch's time: each frame is processed as an
        image within a video's bounds, and stands at its own place in time. Takes one frame after
        the other. Raises ValueError, UnreadableImage when the rows are too many.
        """
        time = int(self.settings["temporal_patch_size"])
        values: _Pixels = np.empty(0, np.uint8)
        size = (0, 0)
        make, moments = (self._values, time) if self.scaling is None else (self._bytes, 1)
        for index, picture in enumerate(pictures):
            if index and picture.size != size:
                raise ValueError("its frames differ in size")
            size = picture.size
            made = make(picture, size=self.settings["video_size"])
            apart = made.reshape(len(made), _CHANNELS, moments, -1)[:, :, 0]
            if index == 0:
                steps = -(-count // time)
                limits.check_rows(steps * len(made) // int(self.settings["merge_size"]) ** 2)
                values = np.empty((steps, *apart.shape[:2], time, apart.shape[2]), made.dtype)
            # The last frame is repeated to fill its temporal patch.
            values[index // time, :, :, index % time :] = apart[:, :, None]
        return values.reshape(values.shape[0] * values.shape[1], -1), size


def main(
    name: str, config_json: str, limits_json: str, video_json: str, socket_number: str
) -> None:
    """Sends the processor's settings, then answers jobs."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the messages
    files = socket.socket(fileno=int(socket_number))
    limits = ImageLimits(**json.loads(limits_json))
    maker = PixelMaker(name, json.loads(config_json), json.loads(video_json))
    sample = maker.make(PIL.Image.new("RGB", (64, 48)))  # this also loads what the processor needs
    warm_up()
    largest = max(limits.memory_bytes, maker.video_bytes(limits))
    held = confine(largest + _BUFFER_BYTES, largest + _BUFFER_BYTES)
    scaling = None if maker.scaling is None else asdict(maker.scaling)
    hello = {"settings": maker.settings, "shape": sample.shape, "scaling": scaling}
    _send(sink, {**hello, "confinement": asdict(held), "processor_s": time.process_time()})
    while (job := _receive(source)) is not None:
        (descriptor,) = socket.recv_fds(files, 1, 1)[1]
        try:
            answer = _work(maker, limits, job, source.read(job["bytes"]), descriptor)
        finally:
            os.close(descriptor)
        _send(sink, {**answer, "processor_s": time.process_time()})


def _work(
    maker: PixelMaker, limits: ImageLimits, job: dict[str, Any], data: bytes, descriptor: int
) -> dict[str, Any]:
    kind = "video" if frames.is_packed(data) else "image"
    try:
        if frames.is_packed(data):
            pixels, answer = _video(maker, limits, data)
        else:
            image = decode(data, limits)
            pixels, answer = maker.make(image), {"width": image.width, "height": image.height}
        nonce, digest = bytes.fromhex(job["nonce"]), bytes.fromhex(job["digest"])
        artifact_file.write_to(descriptor, nonce, digest, pixels)
    except UnreadableImage as error:
        return {"reason": error.reason, "message": error.message}
    except OSError as error:
        return {"errno": error.errno or 0, "message": str(error)}
    except MemoryError:
        lacking = NeedsMoreMemory(kind, limits.memory_bytes)
        return {"reason": lacking.reason, "message": lacking.message}
    except ValueError as error:
        reason = f"{kind.upper()}_UNUSABLE"
        return {"reason": reason, "message": f"the {kind} cannot be processed: {error}"}
    return answer


def _video(maker: PixelMaker, limits: ImageLimits, data: bytes) -> tuple[_Pixels, dict[str, Any]]:
    if frames.is_video_file(data):
        video = open_video(*frames.unpack_video_file(data), limits)
    else:
        files, pace = frames.unpack(data)
        video = OpenVideo(_decoded(files, limits), len(files), pace)
    pixels, (width, height) = maker.make_video(video.frames, video.count, limits)
    answer = {"frames": video.count, "seconds_per_frame": video.seconds_per_frame}
    return pixels, {"width": width, "height": height, **answer}


def _decoded(files: list[bytes], limits: ImageLimits) -> Iterator[PIL.Image.Image]:
    for number, file in enumerate(files):
        try:
            picture = decode(file, limits)
            limits.check_frames(len(files), *picture.size)
        except UnreadableImage as error:
            raise UnreadableImage(error.reason, f"frame {number}: {error.message}") from error
        yield picture


def _receive(source: BinaryIO) -> dict[str, Any] | None:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    job: dict[str, Any] = json.loads(source.read(_LENGTH.unpack(head)[0]))
    return job


def _send(sink: BinaryIO, message: dict[str, Any]) -> None:
    text = json.dumps(message, default=str).encode()
    sink.write(_LENGTH.pack(len(text)) + text)
    sink.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
