"""The process that decodes images and makes their pixel values: one job at a time over its pipes.

Messages both ways: 4 bytes of length, a JSON object, and as many raw bytes as its field `bytes` gives. With each job
an open file descriptor of the artifact arrives on a socket. The worker makes the pixel values, says how many bytes they
have (`needs`), waits for a message whose `write` says whether there is memory for them, and writes them. It opens no
file itself (`confinement`). It ends when its input ends.

`python -m services.preprocess.worker.image_worker <what makes pixel values, as JSON> <limits as JSON> <number of the
socket>`
"""

import gc
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

# transformers' image processors are numpy and Pillow; torch would cost two seconds and 200 MB for nothing.
sys.modules["torch"] = None  # type: ignore[assignment]
gc.disable()  # until all is loaded, which lives on

import PIL.Image  # noqa: E402
import PIL.ImageOps  # noqa: E402

from services.preprocess.media import (  # noqa: E402
    fitted_picture,
    frames,
    item_options,
    packed_pixels,
)
from services.preprocess.media.image_decoder import decode  # noqa: E402
from services.preprocess.media.image_limits import (  # noqa: E402
    ImageLimits,
    NeedsMoreMemory,
    UnreadableImage,
)
from services.preprocess.media.video import OpenVideo, open_video  # noqa: E402
from services.preprocess.worker.maker import Maker, Pixels  # noqa: E402
from services.preprocess.worker.pixel_maker import PixelMaker  # noqa: E402
from services.preprocess.worker.warm_up import warm_up  # noqa: E402
from shared.artifacts import file as artifact_file  # noqa: E402
from shared.confinement.confinement import confine  # noqa: E402
from shared.errors import ServingError  # noqa: E402
from shared.prompts.modality import IMAGE, NAMES, VIDEO  # noqa: E402
from tessera.common.v1.media_pb2 import Modality  # noqa: E402

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 256 << 20  # besides pixels: the file itself, and the decoder's buffers


def main(maker_json: str, limits_json: str, socket_number: str) -> None:
    """Sends what the maker's settings are, or why it cannot be made, then answers jobs."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the messages
    files = socket.socket(fileno=int(socket_number))
    limits = ImageLimits(**json.loads(limits_json))
    try:
        maker = _make_maker(**json.loads(maker_json))
    except ServingError as error:
        refused = {"refused": error.reason, "message": error.message}
        _send(sink, {**refused, "processor_s": time.process_time()})
        return
    sample, _ = maker.make(PIL.Image.new("RGB", (64, 48)))  # loads what the processor needs, too
    warm_up()
    gc.freeze()
    gc.enable()
    largest = max(limits.memory_bytes, maker.video_bytes(limits))
    held = confine(largest + _BUFFER_BYTES, largest + _BUFFER_BYTES)
    scaling = None if maker.scaling is None else asdict(maker.scaling)
    hello = {"settings": maker.settings, "shape": sample.shape, "scaling": scaling}
    _send(sink, {**hello, "confinement": asdict(held), "processor_s": time.process_time()})
    while (job := _receive(source)) is not None:
        (descriptor,) = socket.recv_fds(files, 1, 1)[1]
        try:
            pixels, answer = _work(maker, limits, job["modality"], source.read(job["bytes"]))
            if pixels is not None:
                _send(sink, {"needs": pixels.nbytes, "processor_s": time.process_time()})
                if not (_receive(source) or {}).get("write"):
                    continue
                answer = _write(job, descriptor, pixels) or answer
        finally:
            os.close(descriptor)
        _send(sink, {**answer, "processor_s": time.process_time()})


def _make_maker(folder: str = "", family: str = "", **options: Any) -> Maker:
    """By the processor of a checkpoint's folder, or by an image processor alone (the options of `PixelMaker`)."""
    if not folder:
        return PixelMaker(**options)
    from services.preprocess.worker.processor_maker import ProcessorMaker

    return ProcessorMaker(Path(folder), family)


def _work(
    maker: Maker, limits: ImageLimits, modality: Modality.ValueType, data: bytes
) -> tuple[Pixels | None, dict[str, Any]]:
    """The pixel values and what else is known of the item, or None and why there are none."""
    kind = NAMES[modality]
    try:
        pixels, answer = _MAKE[modality](maker, limits, data)
    except UnreadableImage as error:
        return None, {"reason": error.reason, "message": error.message}
    except MemoryError:
        lacking = NeedsMoreMemory(kind, limits.memory_bytes)
        return None, {"reason": lacking.reason, "message": lacking.message}
    except (OSError, ValueError) as error:
        reason = f"{kind.upper()}_UNUSABLE"
        return None, {"reason": reason, "message": f"the {kind} cannot be processed: {error}"}
    return pixels, answer


def _write(job: dict[str, Any], descriptor: int, pixels: Pixels) -> dict[str, Any] | None:
    """Writes the artifact; why it could not be written, or None."""
    try:
        nonce, digest = bytes.fromhex(job["nonce"]), bytes.fromhex(job["digest"])
        artifact_file.write_to(descriptor, nonce, digest, pixels)
    except OSError as error:
        return {"errno": error.errno or 0, "message": str(error)}
    return None


def _image(maker: Maker, limits: ImageLimits, data: bytes) -> tuple[Pixels, dict[str, Any]]:
    options, data = item_options.unpack(data)
    if packed_pixels.is_packed(data):
        packed, tokens = packed_pixels.unpack(data)
        return packed, {"width": packed.shape[2], "height": packed.shape[1], "tokens": tokens}
    image = _picture(data, limits, maker.settings.get("upright") is not False)
    pixels, made = maker.make(image, options)
    return pixels, {"width": image.width, "height": image.height, "options": options, **made}


def _picture(data: bytes, limits: ImageLimits, upright: bool) -> PIL.Image.Image:
    if not fitted_picture.is_packed(data):
        return decode(data, limits, upright)
    square, file = fitted_picture.unpack(data)
    whole = decode(file, limits, upright)
    return PIL.ImageOps.pad(whole, (square.side, square.side), color=square.colour)


def _video(maker: Maker, limits: ImageLimits, data: bytes) -> tuple[Pixels, dict[str, Any]]:
    options, data = item_options.unpack(data)
    if frames.is_video_file(data):
        video = open_video(*frames.unpack_video_file(data), limits)
    else:
        files, pace = frames.unpack(data)
        video = OpenVideo(_decoded(files, limits), len(files), pace)
    pixels, (width, height) = maker.make_video(video.frames, video.count, limits, options)
    answer = {"frames": video.count, "seconds_per_frame": video.seconds_per_frame}
    return pixels, {"width": width, "height": height, "options": options, **answer}


_MAKE = {IMAGE: _image, VIDEO: _video}


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
