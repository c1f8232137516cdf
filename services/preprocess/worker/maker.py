"""What the image worker asks of the code that makes pixel values of decoded pictures."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import PIL.Image

from services.preprocess.media.image_limits import ImageLimits
from services.preprocess.media.item_options import Options
from shared.artifacts.pixel_scaling import PixelScaling

CHANNELS = 3
NONE: Options = {}
Pixels = np.ndarray[Any, np.dtype[np.generic]]
Answer: TypeAlias = Mapping[str, Any]  # keys of `MadeItem`, in JSON's types


class Maker(Protocol):
    """Made once, before the worker is confined. `settings` are all that its results depend on, in JSON's types;
    `upright` false among them: pictures are seen as their files store them, whatever EXIF says."""

    settings: dict[str, Any]
    scaling: PixelScaling | None  # of pixels that are stored as bytes

    def make(self, image: PIL.Image.Image, options: Options = NONE) -> tuple[Pixels, Answer]:
        """What goes into the artifact, and what the prompt rule has to know beside the picture's size. `options`: what
        the processor is called with beside its settings.

        Raises ValueError for a picture that cannot be used.
        """

    def video_bytes(self, limits: ImageLimits) -> int:
        """The largest size of a video's pixel values, in bytes; 0 where videos are not taken."""

    def make_video(
        self,
        pictures: Iterable[PIL.Image.Image],
        count: int,
        limits: ImageLimits,
        options: Options = NONE,
    ) -> tuple[Pixels, tuple[int, int]]:
        """What goes into the artifact of a video of `count` frames, and the frames' width and height."""
