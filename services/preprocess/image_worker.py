"""The process that decodes images and makes their pixel values: one job at a time over its pipes.

Frames both ways: 4 bytes of length, a JSON object, and where it says `bytes` that many raw bytes.
The pixel values do not come back by the pipe: the worker writes the artifact's file itself. It ends
when its input ends.

`python -m services.preprocess.image_worker <processor class> <its settings as JSON> <limits as JSON>
<sizes of a video's frames as JSON>`
"""

import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

# transformers' image processors are numpy and Pillow; torch would cost two seconds and 200 MB for nothing.
sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np  # noqa: E402
import PIL.Image  # noqa: E402

from services.preprocess import frames  # noqa: E402
from services.preprocess.film import Film, open_film  # noqa: E402
from services.preprocess.image_decoder import decode  # noqa: E402
from services.preprocess.image_limits import ImageLimits, UnreadableImage  # noqa: E402
from shared import artifact_file  # noqa: E402

_LENGTH = struct.Struct("<I")
_CHANNELS = 3


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
        # A folder without a video processor has its videos treated as its images.
        if "temporal_patch_size" in self.settings:
            self.settings["video_size"] = video_size or self.settings["size"]

    def make(self, image: PIL.Image.Image) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 [channels, height, width], or what else the family's processor makes of a picture."""
        made = self._processor(images=image, return_tensors="np")
        values = made["pixel_values"]
        # Where pictures have grids of their own, the processor gives rows of patches one picture
        # after the other; elsewhere it gives one array for each picture.
        return np.ascontiguousarray(values if "image_grid_thw" in made else values[0], np.float32)

    def make_video(
        self, pictures: Iterable[PIL.Image.Image], count: int, limits: ImageLimits
    ) -> tuple[np.ndarray[Any, np.dtype[np.float32]], tuple[int, int]]:
        """float32 [patches, channels * time * side * side] of `count` frames of one size, and that
        size: width and height.

        For processors that repeat an image to fill a patch's time: each frame is processed as an
        image within a video's bounds, and stands at its own place in time. Takes one frame after
        the other. Raises ValueError, UnreadableImage when the rows are too many.
        """
        time = int(self.settings["temporal_patch_size"])
        values: np.ndarray[Any, np.dtype[np.float32]] = np.empty(0, np.float32)
        size = (0, 0)
        for index, picture in enumerate(pictures):
            if index and picture.size != size:
                raise ValueError("its frames differ in size")
            size = picture.size
            made = self._processor(
                images=picture, size=self.settings["video_size"], return_tensors="np"
            )["pixel_values"]
            apart = made.reshape(len(made), _CHANNELS, time, -1)[:, :, 0]
            if index == 0:
                steps = -(-count // time)
                limits.check_rows(steps * len(made) // int(self.settings["merge_size"]) ** 2)
                values = np.empty((steps, *apart.shape[:2], time, apart.shape[2]), np.float32)
            # The last frame stands in for those that its step lacks.
            values[index // time, :, :, index % time :] = apart[:, :, None]
        return values.reshape(values.shape[0] * values.shape[1], -1), size


def main(name: str, config_json: str, limits_json: str, video_json: str) -> None:
    """Says hello with the processor's settings, then answers jobs."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the frames
    limits = ImageLimits(**json.loads(limits_json))
    maker = PixelMaker(name, json.loads(config_json), json.loads(video_json))
    sample = maker.make(PIL.Image.new("RGB", (64, 48)))  # also warms everything up
    _send(sink, {"settings": maker.settings, "shape": sample.shape})
    while (job := _receive(source)) is not None:
        _send(sink, _work(maker, limits, job, source.read(job["bytes"])))


def _work(
    maker: PixelMaker, limits: ImageLimits, job: dict[str, Any], data: bytes
) -> dict[str, Any]:
    kind = "video" if frames.is_packed(data) else "image"
    try:
        if frames.is_packed(data):
            pixels, told = _video(maker, limits, data)
        else:
            image = decode(data, limits)
            pixels, told = maker.make(image), {"width": image.width, "height": image.height}
        artifact_file.write(
            Path(job["path"]), bytes.fromhex(job["nonce"]), bytes.fromhex(job["digest"]), pixels
        )
    except UnreadableImage as error:
        return {"reason": error.reason, "message": error.message}
    except OSError as error:
        return {"errno": error.errno or 0, "message": str(error)}
    except (ValueError, MemoryError) as error:
        reason = f"{kind.upper()}_UNUSABLE"
        return {"reason": reason, "message": f"the {kind} cannot be processed: {error}"}
    return told


def _video(
    maker: PixelMaker, limits: ImageLimits, data: bytes
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], dict[str, Any]]:
    if frames.is_film(data):
        film = open_film(*frames.unpack_film(data), limits)
    else:
        files, pace = frames.unpack(data)
        film = Film(_decoded(files, limits), len(files), pace)
    pixels, (width, height) = maker.make_video(film.frames, film.count, limits)
    told = {"frames": film.count, "seconds_per_frame": film.seconds_per_frame}
    return pixels, {"width": width, "height": height, **told}


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
