"""Qwen2-VL and Qwen2.5-VL: pictures keep their resolution, rounded to whole merged patches.

With `side` pixels to a merged patch (28 in the released checkpoints) the resized picture has

    rows = height / side * width / side

embedding rows. Its sides are the nearest multiples of `side` (Python's rounding, half to even); a
picture that would then have too many or too few pixels is scaled, its sides rounded down or up.
A video has as many rows for each `temporal_patch_size` frames, within bounds of its own.
"""

import math
from collections.abc import Mapping
from typing import Any

from services.preprocess.models.prompt_rule import ImageProcessing, MediaSpan
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

_DEFAULT_IMAGE_TOKEN = 151_655
_DEFAULTS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_DEFAULT_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


class Qwen2VLRule:
    """Rows and grid by the picture's size."""

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing, marker: str) -> None:
        settings = {**_DEFAULTS, **processing.settings}
        vision = checkpoint.vision_config or {}
        self.marker: str | None = marker
        self.marker_id = image_token_id(checkpoint.config)
        self._patch, self._merge = int(settings["patch_size"]), int(settings["merge_size"])
        self.video_marker_id = int(checkpoint.config.get("video_token_id") or -1)
        self._frames = int(settings["temporal_patch_size"])
        # The processor's `size` counts pixels here, whatever its keys are called.
        self._pixels = _bounds({**_DEFAULT_PIXELS, **(settings.get("size") or {})})
        self._video_pixels = _bounds(settings.get("video_size") or _DEFAULT_PIXELS)
        self._resizes = bool(settings.get("do_resize", True))
        expected = (vision.get("patch_size") or 14, vision.get("spatial_merge_size") or 2)
        if (self._patch, self._merge) != expected or not self._resizes:
            raise InvalidRequest(
                "BAD_CHECKPOINT",
                f"the image processor makes patches of {self._patch} pixels and merges"
                f" {self._merge}, the tower takes {expected[0]} and {expected[1]}; do_resize must"
                " be true: see preprocessor_config.json",
            )

    def span(self, width: int, height: int) -> MediaSpan:
        """A placeholder for each merged patch."""
        columns, rows = self._merged(width, height, *self._pixels)
        count = columns * rows
        grid = (1, rows * self._merge, columns * self._merge)
        return MediaSpan(token_ids=(self.marker_id,) * count, rows=count, grid=grid)

    def video_span(self, frames: int, width: int, height: int) -> MediaSpan:
        """The same for each step of time; the last frame stands in for those that a step lacks."""
        columns, rows = self._merged(width, height, *self._video_pixels)
        steps = -(-frames // self._frames)
        count = steps * columns * rows
        grid = (steps, rows * self._merge, columns * self._merge)
        return MediaSpan(
            token_ids=(self.video_marker_id,) * count,
            rows=count,
            grid=grid,
            frames_per_step=self._frames,
        )

    def _merged(self, width: int, height: int, least: int, most: int) -> tuple[int, int]:
        """Columns and rows of merged patches (transformers' `smart_resize`)."""
        side = self._patch * self._merge
        columns, rows = round(width / side), round(height / side)
        if columns * rows * side * side > most:
            shrink = math.sqrt((height * width) / most)
            columns = max(1, math.floor(width / shrink / side))
            rows = max(1, math.floor(height / shrink / side))
        elif columns * rows * side * side < least:
            stretch = math.sqrt(least / (height * width))
            columns = math.ceil(width * stretch / side)
            rows = math.ceil(height * stretch / side)
        return columns, rows


def _bounds(size: Mapping[str, Any]) -> tuple[int, int]:
    return int(size["shortest_edge"]), int(size["longest_edge"])


def image_token_id(config: dict[str, Any]) -> int:
    """The placeholder's id."""
    return int(config.get("image_token_id") or _DEFAULT_IMAGE_TOKEN)
