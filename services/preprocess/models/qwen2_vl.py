"""Qwen2-VL and Qwen2.5-VL: pictures keep their resolution, rounded to whole merged patches.

With `side` pixels to a merged patch (28 in the released checkpoints) the resized picture has

    rows = height / side * width / side

embedding rows. Its sides are the nearest multiples of `side` (Python's rounding, half to even); a
picture that would then have too many or too few pixels is scaled, its sides rounded down or up.
"""

import math
from typing import Any

from services.preprocess.models.prompt_rule import ImageProcessing, MediaSpan
from shared.checkpoint import Checkpoint
from shared.errors import Unavailable

_DEFAULT_IMAGE_TOKEN = 151_655
_DEFAULTS = {"patch_size": 14, "merge_size": 2}
_DEFAULT_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


class Qwen2VLRule:
    """Rows and grid by the picture's size."""

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing, marker: str) -> None:
        settings = {**_DEFAULTS, **processing.settings}
        vision = checkpoint.vision_config or {}
        self.marker: str | None = marker
        self.marker_id = image_token_id(checkpoint.config)
        self._patch, self._merge = int(settings["patch_size"]), int(settings["merge_size"])
        # The processor's `size` counts pixels here, whatever its keys are called.
        size = {**_DEFAULT_PIXELS, **(settings.get("size") or {})}
        self._least, self._most = int(size["shortest_edge"]), int(size["longest_edge"])
        self._resizes = bool(settings.get("do_resize", True))
        expected = (vision.get("patch_size") or 14, vision.get("spatial_merge_size") or 2)
        if (self._patch, self._merge) != expected or not self._resizes:
            raise Unavailable(
                "BAD_CHECKPOINT",
                f"the image processor makes patches of {self._patch} pixels and merges"
                f" {self._merge}, the tower takes {expected[0]} and {expected[1]}; do_resize must"
                " be true: see preprocessor_config.json",
            )

    def span(self, width: int, height: int) -> MediaSpan:
        """A placeholder for each merged patch."""
        columns, rows = self._merged(width, height)
        count = columns * rows
        grid = (1, rows * self._merge, columns * self._merge)
        return MediaSpan(token_ids=(self.marker_id,) * count, rows=count, grid=grid)

    def _merged(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of merged patches (transformers' `smart_resize`)."""
        side = self._patch * self._merge
        columns, rows = round(width / side), round(height / side)
        if columns * rows * side * side > self._most:
            shrink = math.sqrt((height * width) / self._most)
            columns = max(1, math.floor(width / shrink / side))
            rows = max(1, math.floor(height / shrink / side))
        elif columns * rows * side * side < self._least:
            stretch = math.sqrt(self._least / (height * width))
            columns = math.ceil(width * stretch / side)
            rows = math.ceil(height * stretch / side)
        return columns, rows


def image_token_id(config: dict[str, Any]) -> int:
    """The placeholder's id."""
    return int(config.get("image_token_id") or _DEFAULT_IMAGE_TOKEN)
