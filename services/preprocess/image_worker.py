"""The process that decodes images and makes their pixel values: one job at a time over its pipes.

Frames both ways: 4 bytes of length, a JSON object, and where it says `bytes` that many raw bytes.
The pixel values do not come back by the pipe: the worker writes the artifact's file itself. It ends
when its input ends.

`python -m services.preprocess.image_worker <processor class> <its settings as JSON> <limits as JSON>`
"""

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

# transformers' image processors are numpy and Pillow; torch would cost two seconds and 200 MB for nothing.
sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np  # noqa: E402
import PIL.Image  # noqa: E402

from services.preprocess.image_decoder import decode  # noqa: E402
from services.preprocess.image_limits import ImageLimits, UnreadableImage  # noqa: E402
from shared import artifact_file  # noqa: E402

_LENGTH = struct.Struct("<I")


class PixelMaker:
    """The checkpoint's own image processor, from transformers, in its Pillow form."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        import transformers

        found = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
        if found is None:
            raise SystemExit(f"transformers has no image processor {name}")
        self._processor = found.from_dict(config)
        self.settings: dict[str, Any] = {
            key: value for key, value in self._processor.to_dict().items() if value is not None
        }

    def make(self, image: PIL.Image.Image) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 [channels, height, width], or what else the family's processor makes of a picture."""
        made = self._processor(images=image, return_tensors="np")
        values = made["pixel_values"]
        # Where pictures have grids of their own, the processor gives rows of patches one picture
        # after the other; elsewhere it gives one array for each picture.
        return np.ascontiguousarray(values if "image_grid_thw" in made else values[0], np.float32)


def main(name: str, config_json: str, limits_json: str) -> None:
    """Says hello with the processor's settings, then answers jobs."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the frames
    limits = ImageLimits(**json.loads(limits_json))
    maker = PixelMaker(name, json.loads(config_json))
    sample = maker.make(PIL.Image.new("RGB", (64, 48)))  # also warms everything up
    _send(sink, {"settings": maker.settings, "shape": sample.shape})
    while (job := _receive(source)) is not None:
        _send(sink, _work(maker, limits, job, source.read(job["bytes"])))


def _work(
    maker: PixelMaker, limits: ImageLimits, job: dict[str, Any], data: bytes
) -> dict[str, Any]:
    try:
        image = decode(data, limits)
        pixels = maker.make(image)
        artifact_file.write(
            Path(job["path"]), bytes.fromhex(job["nonce"]), bytes.fromhex(job["digest"]), pixels
        )
    except UnreadableImage as error:
        return {"reason": error.reason, "message": error.message}
    except OSError as error:
        return {"errno": error.errno or 0, "message": str(error)}
    except (ValueError, MemoryError) as error:
        return {"reason": "IMAGE_UNUSABLE", "message": f"the image cannot be processed: {error}"}
    return {"width": image.width, "height": image.height}


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
