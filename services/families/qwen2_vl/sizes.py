"""How large pictures and videos of Qwen2-VL and Qwen2.5-VL are once they are resized, in merged patches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality

DEFAULTS: Mapping[str, int] = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_DEFAULT_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_MOST_FRAMES = 768
_MOST_ASPECT = 200  # transformers refuses longer pictures


@dataclass(frozen=True)
class Resizing:
    """`side`: pixels along a merged patch; a picture has from `least` to `most` pixels."""

    side: int
    least: int
    most: int

    @classmethod
    def read(cls, settings: Mapping[str, Any], size: Mapping[str, Any] | None) -> "Resizing":
        """From a processor's settings, after defaults. Its `size` counts pixels, whatever its keys are called."""
        bounds = {**_DEFAULT_PIXELS, **(size or {})}
        side = int(settings["patch_size"]) * int(settings["merge_size"])
        return cls(side, int(bounds["shortest_edge"]), int(bounds["longest_edge"]))

    def merged(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of merged patches of a picture (transformers' `smart_resize`).

        Its sides are rounded to the nearest multiples of `side`, half to even; with too many or too few pixels it is
        scaled, its sides rounded down or up.
        """
        side = self.side
        columns, rows = round(width / side), round(height / side)
        if columns * rows * side * side > self.most:
            shrink = math.sqrt((height * width) / self.most)
            columns = max(1, math.floor(width / shrink / side))
            rows = max(1, math.floor(height / shrink / side))
        elif columns * rows * side * side < self.least:
            stretch = math.sqrt(self.least / (height * width))
            columns = math.ceil(width * stretch / side)
            rows = math.ceil(height * stretch / side)
        return columns, rows

    def largest(self) -> tuple[int, int]:
        """Columns and rows of the picture that has most."""
        most = max(1, self.most // self.side**2)
        pairs = [(most // rows, rows) for rows in range(1, math.isqrt(most) + 1)]
        fitting = [pair for pair in pairs if pair[0] <= _MOST_ASPECT * pair[1]]
        return max(fitting, key=lambda pair: (pair[0] * pair[1], pair[1]))


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`."""
    images = {**DEFAULTS, **checkpoint.image_processor_config}
    videos = checkpoint.video_processor_config
    frames = 0
    size = pixel_bounds(images)
    if modality == Modality.MODALITY_VIDEO:
        frames = int(videos.get("max_frames") or _MOST_FRAMES)
        bounds = pixel_bounds(videos)
        size = bounds if bounds.keys() >= _DEFAULT_PIXELS.keys() else size
    resizing = Resizing.read(images, size)
    columns, rows = resizing.largest()
    steps = max(1, -(-frames // int(images["temporal_patch_size"])))
    tokens = steps * columns * rows
    return ItemSize(columns * resizing.side, rows * resizing.side, frames, tokens, modality)


def pixel_bounds(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`shortest_edge` and `longest_edge` of a processor's file, under their new or their old names."""
    size = dict(settings.get("size") or {})
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if settings.get(old) is not None:
            size[new] = settings[old]
    return size
