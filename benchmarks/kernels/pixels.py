"""What an image costs before the tower: from JPEG to pixels, as bytes and as float32.

`make bench ARGS=pixels`; processor time of one core.
"""

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image

from services.preprocess.media import early_resize
from services.preprocess.media.image_decoder import decode
from services.preprocess.media.image_limits import ImageLimits

_LIMITS = ImageLimits(max_pixels=50_000_000)
_SIZES = ((336, 336), (1344, 1344), (1152, 864), (2304, 1728), (4032, 3024))
_PROCESSORS: dict[str, dict[str, Any]] = {
    "SiglipImageProcessor": {"size": {"height": 336, "width": 336}},
    "Qwen2VLImageProcessor": {"size": {"shortest_edge": 56 * 56, "longest_edge": 1344 * 1344}},
}


def main(arguments: list[str]) -> None:
    """Prints, for each processor and size, bytes and milliseconds of both ways."""
    # It imports transformers, which takes seconds.
    from services.preprocess.worker.pixel_maker import PixelMaker

    for name, settings in _PROCESSORS.items():
        maker = PixelMaker(name, settings, None)
        for width, height in _SIZES:
            compare(f"{name} {width}x{height}", maker, photo(width, height))


def compare(what: str, maker: Any, data: bytes) -> None:
    """One line."""
    image = decode(data, _LIMITS)

    def make() -> Any:
        return maker.make(image)[0]

    pixels, as_bytes = make(), measure(make)
    find, early_resize.target_size = early_resize.target_size, lambda *_: None
    late = measure(make)
    scaling, maker.scaling = maker.scaling, None
    values, as_values = make(), measure(make)
    early_resize.target_size, maker.scaling = find, scaling
    print(
        f"{what}: decoding {measure(lambda: decode(data, _LIMITS)):.1f} ms; bytes {pixels.nbytes:,}"
        f" in {as_bytes:.1f} ms ({late:.1f} where the processor resizes); float32 {values.nbytes:,}"
        f" in {as_values:.1f} ms"
    )


def photo(width: int, height: int) -> bytes:
    """A JPEG with as much detail as a photo has."""
    numbers = np.random.default_rng(0)
    coarse = numbers.integers(0, 255, (height // 16, width // 16, 3), np.uint8)
    smooth = np.asarray(PIL.Image.fromarray(coarse).resize((width, height))).astype(np.int16)
    noisy = smooth + numbers.integers(-6, 6, smooth.shape)
    file = io.BytesIO()
    PIL.Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
    return file.getvalue()


def measure(work: Callable[[], object], repeats: int = 5) -> float:
    """Least milliseconds of processor time."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return 1e3 * best
