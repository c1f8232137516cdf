"""LLaVA-NeXT (Liu et al., 2024): pictures of any resolution as squares of the tower's size.

A picture is shown whole as one square, and again at the best of the checkpoint's resolutions, which
are multiples of that square. With `side` patches along a square's edge:

    rows = side^2 + height * (width + 1)

where height and width, in patches, are those of the best resolution less the padding that keeps the
picture's proportions; each line of patches ends with one row more, the newline.
"""

from collections.abc import Sequence
from typing import Any

from services.preprocess.models.llava import DEFAULT_VISION, image_token_id, tower_rows
from services.preprocess.models.prompt_rule import ImageProcessing, ImagesOnly, MediaSpan
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

_DEFAULT_RESOLUTIONS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


class LlavaNextRule(ImagesOnly):
    """Rows by the picture's size. Resolutions are (height, width) in pixels."""

    def __init__(self, checkpoint: Checkpoint, processing: ImageProcessing, marker: str) -> None:
        config = checkpoint.config
        vision = checkpoint.vision_config or DEFAULT_VISION
        self.marker: str | None = marker
        self.marker_id = image_token_id(config)
        self._base_rows = tower_rows(config, vision, processing.shape[1:])
        self._side = round(self._base_rows**0.5)
        self._pixels = processing.shape[-1]
        if self._side * self._side != self._base_rows:
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"a square of {self._base_rows} rows is no map: vision_feature_select_strategy must"
                ' be "default" with a class token and "full" without one',
            )
        self._resolutions = _resolutions(config, processing.settings, self._pixels)

    def span(self, width: int, height: int) -> MediaSpan:
        """Placeholders of the whole picture's rows, then those of its map and the newlines."""
        best_height, best_width = best_resolution(width, height, self._resolutions)
        down = best_height // self._pixels * self._side
        across = best_width // self._pixels * self._side
        # Rounded as transformers does, on whose numbers the models were trained.
        if width / height > across / down:
            down -= 2 * ((down - int(round(height * (across / width), 7))) // 2)
        else:
            across -= 2 * ((across - int(round(width * (down / height), 7))) // 2)
        rows = self._base_rows + down * (across + 1)
        return MediaSpan(token_ids=(self.marker_id,) * rows, rows=rows)


def best_resolution(
    width: int, height: int, resolutions: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """The (height, width) that keeps most pixels of a picture, and of those the one that wastes least."""

    def merit(resolution: Sequence[int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    best = max(resolutions, key=merit)
    return best[0], best[1]


def _resolutions(config: dict[str, Any], settings: Any, pixels: int) -> list[list[int]]:
    """The resolutions, which model and image processor must agree on."""
    model = [list(r) for r in config.get("image_grid_pinpoints") or _DEFAULT_RESOLUTIONS]
    processor = [list(r) for r in settings.get("image_grid_pinpoints") or _DEFAULT_RESOLUTIONS]
    wrong = [r for r in model if len(r) != 2 or r[0] % pixels or r[1] % pixels or min(r) < 1]
    if wrong or not model:
        raise InvalidRequest(
            "BAD_CHECKPOINT", f"image_grid_pinpoints {wrong} are no multiples of {pixels} pixels"
        )
    if model != processor:
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"image_grid_pinpoints is {model} in config.json and {processor} in"
            " preprocessor_config.json",
        )
    return model
