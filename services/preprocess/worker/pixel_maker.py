"""Pixel values by the checkpoint's image processor alone, for families whose prompt rule goes by an item's size."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import PIL.Image

from services.preprocess.media import early_resize
from services.preprocess.media.image_limits import ImageLimits
from services.preprocess.media.item_options import Options
from services.preprocess.worker.maker import CHANNELS, NONE, Answer, Pixels
from shared.artifacts.pixel_scaling import PixelScaling
from shared.checkpoint.processor import image_processor_class


class PixelMaker:
    """The checkpoint's own image processor, from transformers, in its Pillow form."""

    def __init__(
        self, name: str, config: dict[str, Any], video_size: dict[str, Any] | None
    ) -> None:
        self._processor = image_processor_class(name).from_dict(config)
        self.settings: dict[str, Any] = {
            key: value for key, value in self._processor.to_dict().items() if value is not None
        }
        # Without a video processor in the folder, videos are resized as images are.
        if "temporal_patch_size" in self.settings:
            self.settings["video_size"] = video_size or self.settings["size"]
        self.scaling = self._find_scaling()

    def make(self, image: PIL.Image.Image, options: Options = NONE) -> tuple[Pixels, Answer]:
        """Pixel values [channels, height, width], or what else the family's processor makes of a picture; nothing else.

        uint8 where there is a `scaling` that makes the processor's float32 of them, a patch's
        moments then being one; else those float32.
        """
        # What it does first depends on the options.
        small = image if options else early_resize.resize(self._processor, image)
        make = self._values if self.scaling is None else self._bytes
        return make(small, **options), {}

    def video_bytes(self, limits: ImageLimits) -> int:
        """The largest size of a video's pixel values, in bytes."""
        if "temporal_patch_size" not in self.settings:
            return 0
        side, time = int(self.settings["patch_size"]), int(self.settings["temporal_patch_size"])
        row = int(self.settings["merge_size"]) ** 2 * side**2 * time * CHANNELS
        return limits.max_rows * row * (1 if self.scaling is not None else 4)

    def _bytes(self, image: PIL.Image.Image, **changes: Any) -> Pixels:
        if "temporal_patch_size" in self.settings:
            changes["temporal_patch_size"] = 1
        return self._values(image, do_rescale=False, do_normalize=False, **changes).astype(np.uint8)

    def _values(self, image: PIL.Image.Image, **changes: Any) -> Pixels:
        made = self._processor(images=image, return_tensors="np", **changes)
        values = made["pixel_values"]
        # Where pictures have grids or numbers of tiles of their own, the processor gives patches or tiles one picture
        # after the other; elsewhere it gives one array for each picture.
        values = values if made.keys() & {"image_grid_thw", "num_patches"} else values[0]
        whole = "do_rescale" in changes  # else what numpy made of them may be wider than float32
        return np.ascontiguousarray(values, None if whole else np.float32)

    def _find_scaling(self) -> PixelScaling | None:
        """The scaling from bytes to the processor's values, if it reproduces them bit for bit."""
        every = np.random.default_rng(0).permutation(np.arange(64 * 48 * CHANNELS) % 256)
        picture = PIL.Image.fromarray(every.reshape(48, 64, CHANNELS).astype(np.uint8))
        try:
            scaling = PixelScaling.of(self.settings, CHANNELS)
            values, raw = self._values(picture), self._bytes(picture)
        except (KeyError, TypeError, ValueError):
            return None
        if raw.ndim not in (2, 3, 4) or values.size % raw.size:
            return None
        count = 1 if raw.ndim == 3 else len(raw)  # one square, several, or patches
        apart = raw.reshape(count, CHANNELS, 1, -1)
        found = np.stack([scaling.table()[c][apart[:, c]] for c in range(CHANNELS)], axis=1)
        wanted = values.reshape(count, CHANNELS, values.size // raw.size, -1)
        return scaling if (found == wanted).all() else None

    def make_video(
        self,
        pictures: Iterable[PIL.Image.Image],
        count: int,
        limits: ImageLimits,
        options: Options = NONE,
    ) -> tuple[Pixels, tuple[int, int]]:
        """uint8 or float32 [patches, channels * time * side * side] of `count` frames of one size,
        and that size: width and height.

        For processors that repeat an image to fill a patch's time: each frame is processed as an
        image within a video's bounds, and stands at its own place in time. Takes one frame after
        the other. Raises ValueError, UnreadableImage when the rows are too many.
        """
        time = int(self.settings["temporal_patch_size"])
        values: Pixels = np.empty(0, np.uint8)
        size = (0, 0)
        make, moments = (self._values, time) if self.scaling is None else (self._bytes, 1)
        for index, picture in enumerate(pictures):
            if index and picture.size != size:
                raise ValueError("its frames differ in size")
            size = picture.size
            made = make(picture, **{"size": self.settings["video_size"], **options})
            apart = made.reshape(len(made), CHANNELS, moments, -1)[:, :, 0]
            if index == 0:
                steps = -(-count // time)
                limits.check_rows(steps * len(made) // int(self.settings["merge_size"]) ** 2)
                values = np.empty((steps, *apart.shape[:2], time, apart.shape[2]), made.dtype)
            # The last frame is repeated to fill its temporal patch.
            values[index // time, :, :, index % time :] = apart[:, :, None]
        return values.reshape(values.shape[0] * values.shape[1], -1), size
